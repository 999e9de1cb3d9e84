"""Table 2, ConViT, in 60 epochs.

    ripple train cifar100-short-convit-tiny

One H200, bf16: 54.5 % top-1, 83.3 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("convit6_tiny_patch2_32")
