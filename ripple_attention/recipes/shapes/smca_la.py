"""Shapes: SMCA-LA on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca-la

Not yet run.
"""

from ripple_attention.recipes.shapes import shapes

RECIPE = shapes("smca_la_resnet18")
