"""Table 4, truncated ripples.

    ripple train cifar100-ripple-tiny-truncated

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32", weights="truncated")
