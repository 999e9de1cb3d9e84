"""Table 6, T2R, and ours without the fully connected layer.

    ripple train imagenet-deit-la-tiny-t2r --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_tiny_patch16_224", feature_map="t2r")
