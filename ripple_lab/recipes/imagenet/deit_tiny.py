"""Table 1, DeiT.

    ripple train imagenet-deit-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit6_tiny_patch16_224")
