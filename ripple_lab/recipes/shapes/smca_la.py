"""Shapes: SMCA-LA on pictures of circles, squares and triangles, on the CPU.

    ripple train shapes-smca-la

One CPU core, about eleven minutes, other work going on beside it, one seed: AP 0.788, AP50 0.962 on
pictures by which the recipe was chosen for SMCA-Ripple; the curve is
benchmarks/results/shapes-smca-la-amd-epyc-1-threads.csv.
"""

from ripple_lab.recipes.shapes import shapes

RECIPE = shapes("smca_la_resnet18")
