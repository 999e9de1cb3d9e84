"""Table 1, DeiT-LA.

    ripple train imagenet-deit-la-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_tiny_patch16_224")
