"""Table 2, Ripple.

    ripple train cifar100-ripple-tiny

One H200, bf16, `--ema-decay None --optimizer.no-decay-feature-maps`, 300 epochs:
75.0 % top-1, 92.8 % top-5 (seed 0).
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32")
