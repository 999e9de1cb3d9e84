"""Shapes: SMCA on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca

Not yet run.
"""

from ripple_attention.recipes.shapes import shapes

RECIPE = shapes("smca_resnet18")
