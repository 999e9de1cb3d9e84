"""Table 2, DeiT, in 60 epochs.

    ripple train cifar100-short-deit-tiny

One H200, bf16: 52.7 % top-1, 82.5 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("deit6_tiny_patch2_32")
