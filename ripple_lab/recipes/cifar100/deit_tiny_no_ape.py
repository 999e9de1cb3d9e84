"""Table 2, DeiT, no position embeddings.

    ripple train cifar100-deit-tiny-no-ape

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("deit6_tiny_patch2_32", position_embeddings=False)
