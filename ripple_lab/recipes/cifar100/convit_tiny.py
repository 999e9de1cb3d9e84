"""Table 2, ConViT.

    ripple train cifar100-convit-tiny

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("convit6_tiny_patch2_32")
