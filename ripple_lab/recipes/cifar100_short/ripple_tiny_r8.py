"""Table 4, R_max = 8, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-r8

One H200, bf16: 56.7 % top-1, 85.0 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", max_distance=8)
