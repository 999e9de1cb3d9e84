"""Table 1, ConViT.

    ripple train imagenet-convit-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("convit6_tiny_patch16_224")
