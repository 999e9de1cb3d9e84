"""Table 4, fixed weights, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-fixed

Not yet run.
"""

from ripple_attention.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", weights="fixed")
