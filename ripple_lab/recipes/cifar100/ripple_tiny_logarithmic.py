"""Table 4, logarithmic rings.

    ripple train cifar100-ripple-tiny-logarithmic

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32", partition="logarithmic", max_distance=15)
