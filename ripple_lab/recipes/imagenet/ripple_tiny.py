"""Table 1, Ripple.

    ripple train imagenet-ripple-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("ripple_tiny_patch16_224")
