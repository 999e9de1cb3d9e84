"""Table 8, Ripple of 4 layers.

    ripple train cifar100-ripple-tiny4

Not yet run.
"""

from ripple_attention.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny4_patch2_32")
