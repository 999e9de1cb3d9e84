"""Shapes: SMCA-Ripple on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca-ripple

One CPU core, about ten minutes, other work going on beside it: AP 0.846, AP50 0.988; the curve is
benchmarks/results/shapes-smca-ripple-amd-epyc-1-threads.csv.
"""

from ripple_attention.recipes.shapes import shapes

RECIPE = shapes("smca_ripple_resnet18")
