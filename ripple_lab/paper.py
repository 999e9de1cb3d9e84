"""The paper's own numbers, which ours are compared with.

Zheng, Pan & Kong, *Ripple Attention for Visual Perception with Sub-quadratic Complexity* (2022).
"""

# Millions of parameters: table 1 (ImageNet, 224²), then tables 2 and 8 (CIFAR-100, 32²), which do
# not agree with each other.
PARAMETERS: dict[str, dict[str, float]] = {
    "deit6_tiny_patch16_224": {"table 1": 5.72},
    "convit6_tiny_patch16_224": {"table 1": 5.72},
    "deit_la_tiny_patch16_224": {"table 1": 5.76},
    "deit_la_sinespe_tiny_patch16_224": {"table 1": 5.84},
    "deit_la_convspe_tiny_patch16_224": {"table 1": 6.69},
    "deit_la_rope_tiny_patch16_224": {"table 1": 5.76},
    "permuteformer_tiny_patch16_224": {"table 1": 5.76},
    "ripple_tiny_patch16_224": {"table 1": 5.78},
    "deit_la_tiny_patch2_32": {"table 2": 5.42, "table 8": 5.50},
    "deit6_tiny_patch2_32": {"table 2": 5.42},
    "convit6_tiny_patch2_32": {"table 2": 5.42},
    "ripple_tiny_patch2_32": {"table 2": 5.47, "table 8": 5.52},
    "deit_la_tiny4_patch2_32": {"table 8": 1.88},
    "ripple_tiny4_patch2_32": {"table 8": 1.89},
}

# Top-1 and top-5 in percent by recipe: tables 1, 2, 4, 6 and 7. Table 6 gives top-1 alone; those
# top-5 that only table 7 has are below.
ACCURACY: dict[str, tuple[float, ...]] = {
    "imagenet-deit-tiny": (72.20, 91.10),
    "imagenet-convit-tiny": (73.11, 91.71),
    "imagenet-deit-la-tiny": (70.67, 90.16),
    "imagenet-deit-la-sinespe-tiny": (67.32, 88.14),
    "imagenet-deit-la-convspe-tiny": (67.64, 88.40),
    "imagenet-deit-la-rope-tiny": (71.19, 90.48),
    "imagenet-permuteformer-tiny": (71.42, 90.51),
    "imagenet-ripple-tiny": (73.02, 91.56),
    "cifar100-deit-la-tiny": (67.00, 88.57),
    "cifar100-deit-tiny": (67.87, 89.71),
    "cifar100-convit-tiny": (74.34, 92.87),
    "cifar100-ripple-tiny": (73.94, 92.37),
    "cifar100-deit-la-tiny-no-ape": (54.04, 79.66),
    "cifar100-deit-tiny-no-ape": (53.64, 80.30),
    "cifar100-convit-tiny-no-ape": (73.88, 92.20),
    "cifar100-ripple-tiny-no-ape": (72.94, 91.86),
    "cifar100-ripple-tiny-r2": (72.65, 91.83),
    "cifar100-ripple-tiny-r8": (73.37, 92.21),
    "cifar100-ripple-tiny-r16": (73.48, 92.25),
    "cifar100-ripple-tiny-fixed": (71.34, 90.77),
    "cifar100-ripple-tiny-logarithmic": (73.05, 91.78),
    "cifar100-ripple-tiny-truncated": (72.18, 91.66),
    "cifar100-ripple-tiny-softmax": (71.94, 91.83),
    "imagenet-deit-la-tiny-rfa": (67.10,),
    "imagenet-deit-la-tiny-performer": (65.92,),
    "imagenet-deit-la-tiny-dpfp": (63.95,),
    "imagenet-deit-la-tiny-t2r": (70.02,),
    "imagenet-deit-la-tiny-random-w1": (66.82,),
    "imagenet-ripple-tiny-layers-3": (71.63,),
    "imagenet-ripple-tiny-layers-6": (72.41,),
    "imagenet-ripple-tiny-layers-12": (72.69,),
}

# Table 3: millions of parameters, billions of multiply-adds, seconds for an image (it does not say
# on what).
DETECTORS: dict[str, dict[str, float]] = {
    "smca_resnet50": {"parameters": 41.5, "gflops": 88, "seconds": 0.059},
    "smca_la_resnet50": {"parameters": 41.7, "gflops": 79, "seconds": 0.062},
    "smca_ripple_resnet50": {"parameters": 41.8, "gflops": 80, "seconds": 0.065},
}

# AP, and that of small, medium and large objects, in percent by recipe: table 3.
AVERAGE_PRECISION: dict[str, tuple[float, float, float, float]] = {
    "coco-smca-50": (41.0, 21.9, 44.3, 59.1),
    "coco-smca-la-50": (39.1, 19.8, 42.8, 56.5),
    "coco-smca-ripple-50": (40.5, 22.1, 44.1, 57.7),
    "coco-smca-108": (42.7, 22.8, 46.1, 60.0),
    "coco-smca-la-108": (41.1, 22.0, 44.5, 59.0),
    "coco-smca-ripple-108": (42.3, 23.2, 45.6, 60.0),
}

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
