"""Shapes: SMCA-Ripple on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca-ripple

Not yet run.
"""

from ripple_attention.recipes.shapes import shapes

RECIPE = shapes("smca_ripple_resnet18")
