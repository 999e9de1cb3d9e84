"""Shapes: SMCA-Ripple on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca-ripple

One CPU core (two for the first 192 of 1,200 steps), about ten minutes, other work going on beside
it, one seed: AP 0.846, AP50 0.988 on the pictures by which the recipe was chosen; the curve is
benchmarks/results/shapes-smca-ripple-amd-epyc-1-threads.csv.
"""

from ripple_lab.recipes.shapes import shapes

RECIPE = shapes("smca_ripple_resnet18")
