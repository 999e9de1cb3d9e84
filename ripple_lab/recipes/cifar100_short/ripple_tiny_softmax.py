"""Table 4, softmax weights, in 60 epochs.

    ripple train cifar100-short-ripple-tiny-softmax

One H200, bf16: 56.2 % top-1, 84.8 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100_short import cifar100_short

RECIPE = cifar100_short("ripple_tiny_patch2_32", weights="softmax")
