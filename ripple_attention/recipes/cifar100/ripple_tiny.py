"""Table 2, Ripple.

    ripple train cifar100-ripple-tiny

Not yet run.
"""

from ripple_attention.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32")
