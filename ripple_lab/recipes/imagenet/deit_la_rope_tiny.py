"""Table 1, DeiT-LA + RoPE.

    ripple train imagenet-deit-la-rope-tiny --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_rope_tiny_patch16_224")
