"""The paper's own numbers that `ripple_attention.paper` does not hold.

Keys are those of that file: recipes, and models where a number belongs to a model.
"""

# Millions of parameters without position embeddings, by model: table 2.
PARAMETERS_WITHOUT_POSITIONS: dict[str, float] = {
    "deit_la_tiny_patch2_32": 5.36,
    "deit6_tiny_patch2_32": 5.36,
    "convit6_tiny_patch2_32": 5.36,
    "ripple_tiny_patch2_32": 5.42,
}

# Top-5 in percent of the rows of table 7 that no other table has.
TOP5_OF_TABLE_7: dict[str, float] = {
    "imagenet-ripple-tiny-layers-3": 90.42,
    "imagenet-ripple-tiny-layers-6": 90.32,
    "imagenet-ripple-tiny-layers-12": 91.30,
}

# Top-1 in percent: table 8. Two of its models are in table 2 too, with other numbers.
TOP1_OF_TABLE_8: dict[str, float] = {
    "cifar100-deit-la-tiny4": 63.35,
    "cifar100-deit-la-tiny": 67.10,
    "cifar100-ripple-tiny4": 70.03,
    "cifar100-ripple-tiny": 74.11,
}

# Images a second at batch 64, by table; table 7 says that it was one V100.
SPEED: dict[str, dict[str, float]] = {
    "table 4": {
        "cifar100-ripple-tiny-r2": 832,
        "cifar100-ripple-tiny": 792,
        "cifar100-ripple-tiny-r8": 578,
        "cifar100-ripple-tiny-r16": 382,
        "cifar100-ripple-tiny-fixed": 795,
        "cifar100-ripple-tiny-logarithmic": 810,
        "cifar100-ripple-tiny-truncated": 820,
        "cifar100-ripple-tiny-softmax": 784,
        "cifar100-deit-la-tiny": 2664,
    },
    "table 7": {
        "imagenet-deit-la-tiny": 2664,
        "imagenet-ripple-tiny-layers-3": 1355,
        "imagenet-ripple-tiny-layers-6": 916,
        "imagenet-ripple-tiny": 792,
        "imagenet-ripple-tiny-layers-12": 563,
    },
    "table 8": {
        "cifar100-deit-la-tiny4": 6953,
        "cifar100-deit-la-tiny": 2686,
        "cifar100-ripple-tiny4": 2369,
        "cifar100-ripple-tiny": 893,
    },
}

# Time of H×W = T tokens and R rings, and the power of T in it: table 5. R grows with the side.
COMPLEXITY: dict[str, tuple[str, float]] = {
    "softmax attention": ("O(H²W²)", 2.0),
    "ripple-softmax": ("O(HWR²)", 2.0),
    "linearized attention": ("O(HW)", 1.0),
    "ripple (naïve)": ("O(HWR²)", 2.0),
    "ripple (DP)": ("O(HWR)", 1.5),
}

# The figures on time and memory: channels of a token, and images at a time.
FIGURE_WIDTH, FIGURE_BATCH = 96, 4
# The speeds of tables 4 and 7: images at a time.
SPEED_BATCH = 64
