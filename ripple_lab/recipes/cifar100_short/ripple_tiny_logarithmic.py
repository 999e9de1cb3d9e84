"""Table 4, logarithmic rings, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-logarithmic

One H200, bf16: 56.1 % top-1, 84.5 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", partition="logarithmic", max_distance=15)
