"""Table 8, DeiT-LA of 4 layers.

    ripple train cifar100-deit-la-tiny4

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("deit_la_tiny4_patch2_32")
