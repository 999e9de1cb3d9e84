"""COCO mini: SMCA on a small folder in COCO's format.

    ripple train coco-mini-smca --data.root FOLDER

Not yet run.
"""

from ripple_lab.recipes.coco_mini import coco_mini

RECIPE = coco_mini("smca_resnet18")
