"""Table 3, SMCA-LA, 50 epochs.

    ripple train coco-smca-la-50 --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.coco import coco

RECIPE = coco("smca_la_resnet50", epochs=50)
