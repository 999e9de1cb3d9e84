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
