"""Table 3, SMCA, 50 epochs.

    ripple train coco-smca-50 --hardware.devices 8

Not yet run.
"""

from ripple_lab.recipes.coco import coco

RECIPE = coco("smca_resnet50", epochs=50)
