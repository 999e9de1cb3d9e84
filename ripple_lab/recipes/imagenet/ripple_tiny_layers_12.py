"""Table 7, 12 ripple layers.

    ripple train imagenet-ripple-tiny-layers-12 --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("ripple_tiny_patch16_224", ripple_layers=12)
