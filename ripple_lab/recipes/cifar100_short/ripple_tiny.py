"""Table 2, Ripple, in 60 epochs.

    ripple train cifar100-short-ripple-tiny

One H200, bf16: 56.5 % top-1, 85.2 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32")
