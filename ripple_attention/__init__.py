"""Ripple attention: linear attention that is local where it pays and global everywhere."""

from ripple_attention.feature_maps import FEATURE_MAPS, FeatureMap, create_feature_map
from ripple_attention.functional import (
    NearSoftmax,
    explain,
    linear_attention,
    ripple_attention,
    ripple_softmax_attention,
)
from ripple_attention.heads import RippleHeads
from ripple_attention.modules import (
    LinearAttention,
    RippleAttention,
    SoftmaxAttention,
    record_spatial_weights,
)
from ripple_attention.partition import Partition, chebyshev, dense, foveal, logarithmic
from ripple_attention.spatial_weights import (
    SpatialWeights,
    fixed_weights,
    halt,
    halt_group,
    stick_breaking,
)

__version__ = "0.2.0"

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "LinearAttention",
    "NearSoftmax",
    "Partition",
    "RippleAttention",
    "RippleHeads",
    "SoftmaxAttention",
    "SpatialWeights",
    "chebyshev",
    "create_feature_map",
    "dense",
    "explain",
    "fixed_weights",
    "foveal",
    "halt",
    "halt_group",
    "linear_attention",
    "logarithmic",
    "record_spatial_weights",
    "ripple_attention",
    "ripple_softmax_attention",
    "stick_breaking",
]
