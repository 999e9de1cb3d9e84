"""Table 2, ConViT, no position embeddings.

    ripple train cifar100-convit-tiny-no-ape

Not yet run.
"""

from ripple_lab.recipes.cifar100 import cifar100

RECIPE = cifar100("convit6_tiny_patch2_32", position_embeddings=False)
