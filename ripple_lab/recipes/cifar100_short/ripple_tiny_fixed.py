"""Table 4, fixed weights, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-fixed

One H200, bf16: 50.3 % top-1, 80.9 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", weights="fixed")
