"""Table 2, DeiT-LA.

    ripple train cifar100-deit-la-tiny

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("deit_la_tiny_patch2_32")
