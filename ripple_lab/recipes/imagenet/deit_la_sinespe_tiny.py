"""Table 1, DeiT-LA + SineSPE.

    ripple train imagenet-deit-la-sinespe-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_sinespe_tiny_patch16_224")
