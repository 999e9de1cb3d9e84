"""Table 8, DeiT-LA of 4 layers, in 60 epochs.

    ripple train cifar100-short-deit-la-tiny4

One H200, bf16: 47.2 % top-1, 78.2 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("deit_la_tiny4_patch2_32")
