"""Table 4, R_max = 16, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-r16

Not yet run.
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", max_distance=16)
