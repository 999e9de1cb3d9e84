"""Table 1, DeiT-LA + ConvSPE.

    ripple train imagenet-deit-la-convspe-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_convspe_tiny_patch16_224")
