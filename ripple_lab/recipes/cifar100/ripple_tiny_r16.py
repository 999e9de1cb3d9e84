"""Table 4, R_max = 16.

    ripple train cifar100-ripple-tiny-r16

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32", max_distance=16)
