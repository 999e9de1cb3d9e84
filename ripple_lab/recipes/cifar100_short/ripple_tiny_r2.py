"""Table 4, R_max = 2, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-r2

One H200, bf16: 53.5 % top-1, 82.8 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", max_distance=2)
