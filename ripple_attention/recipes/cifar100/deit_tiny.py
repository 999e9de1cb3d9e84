"""Table 2, DeiT.

    ripple train cifar100-deit-tiny

Not yet run.
"""

from ripple_attention.recipes.cifar100 import cifar100

RECIPE = cifar100("deit6_tiny_patch2_32")
