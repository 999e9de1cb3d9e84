"""COCO mini: SMCA-Ripple on a small folder in COCO's format.

    ripple train coco-mini-smca-ripple --data.root FOLDER

Not yet run. (One epoch from random weights was, to see that it works: docs/detection.md.)
"""

from ripple_lab.recipes.coco_mini import coco_mini

RECIPE = coco_mini("smca_ripple_resnet18")
