"""Table 3, SMCA-Ripple, 108 epochs.

    ripple train coco-smca-ripple-108 --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.coco import coco

RECIPE = coco("smca_ripple_resnet50", epochs=108)
