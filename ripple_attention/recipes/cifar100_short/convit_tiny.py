"""Table 2, ConViT, in 60 epochs.

    ripple train cifar100-short-convit-tiny

Not yet run.
"""

from ripple_attention.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("convit6_tiny_patch2_32")
