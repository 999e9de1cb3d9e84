"""Shapes: SMCA on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca

One CPU core, about twelve minutes, other work going on beside it, one seed: AP 0.761, AP50 0.955 on
pictures by which the recipe was chosen for SMCA-Ripple; the curve is
benchmarks/results/shapes-smca-amd-epyc-1-threads.csv.
"""

from ripple_lab.recipes.shapes import shapes

RECIPE = shapes("smca_resnet18")
