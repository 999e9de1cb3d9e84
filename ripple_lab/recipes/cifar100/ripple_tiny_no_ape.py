"""Table 2, Ripple, no position embeddings.

    ripple train cifar100-ripple-tiny-no-ape

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("ripple_tiny_patch2_32", position_embeddings=False)
