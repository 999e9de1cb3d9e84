"""Table 8, Ripple of 4 layers, in 60 epochs.

    ripple train cifar100-short-ripple-tiny4

Not yet run.
"""

from ripple_attention.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny4_patch2_32")
