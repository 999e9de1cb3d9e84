"""Table 8, DeiT-LA of 4 layers, in 60 epochs.

    ripple train cifar100-short-deit-la-tiny4

Not yet run.
"""

from ripple_attention.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("deit_la_tiny4_patch2_32")
