"""Table 1, PermuteFormer.

    ripple train imagenet-permuteformer-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("permuteformer_tiny_patch16_224")
