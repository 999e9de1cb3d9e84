"""Table 2, DeiT-LA, in 60 epochs.

    ripple train cifar100-short-deit-la-tiny

One H200, bf16: 48.8 % top-1, 79.2 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("deit_la_tiny_patch2_32")
