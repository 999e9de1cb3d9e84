"""Table 2, Ripple.

    ripple train cifar100-ripple-tiny

Not yet run to its end: cut off in epoch 274. One H200, bf16, `--optimizer.no-decay-feature-maps`,
at epoch 270 of 300: 74.5 % top-1, 93.1 % top-5 (seed 0).
"""

from ripple_attention.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32")
