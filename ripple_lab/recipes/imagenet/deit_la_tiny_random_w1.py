"""Table 6, ours with W₁ redrawn at every step.

    ripple train imagenet-deit-la-tiny-random-w1 --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_tiny_patch16_224", feature_map="learned-random-w1")
