"""Table 2, DeiT, in 60 epochs.

    ripple train cifar100-short-deit-tiny

Not yet run.
"""

from ripple_attention.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("deit6_tiny_patch2_32")
