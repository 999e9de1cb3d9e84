"""Table 6, Performer.

    ripple train imagenet-deit-la-tiny-performer --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.imagenet import imagenet

RECIPE = imagenet("deit_la_tiny_patch16_224", feature_map="performer")
