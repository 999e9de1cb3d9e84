"""The paper's own numbers, in one place: what ours are shown beside.

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

# Top-1 and top-5 in percent by recipe: tables 1, 2, 4, 6 and 7. Tables 6 and 7 give top-1 alone.
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
