"""What lies between a layer's projections: features, spatial weights, and the operator over both.

`RippleHeads` is that as a module of its own, for attention layers that make q, k and v themselves;
`RippleAttention` is the same with its projections.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ripple_attention import dispatch
from ripple_attention.checks import (
    REMEDY,
    check_choice,
    check_count,
    check_number,
    check_pair,
    describe,
    holds_floats,
    shorten,
)
from ripple_attention.dispatch import Problem
from ripple_attention.feature_maps import FeatureMap, create_feature_map
from ripple_attention.functional import (
    NearSoftmax,
    check_eps,
    ripple_attention,
)
from ripple_attention.fusion import FeatureSpec, WeightSpec, observe, replaces, spec_of
from ripple_attention.operands import (
    check_weights,
    in_function_transform,
    is_exporting,
    is_transformed,
)
from ripple_attention.ops.common import (
    accumulation_dtype,
    autocast_dtype,
    drop_empty_groups,
    safe_divide,
    without_autocast,
)
from ripple_attention.ops.fused import fused_features, fused_ripple_attention, fused_weights
from ripple_attention.partition import Partition, chebyshev, foveal, logarithmic
from ripple_attention.spatial_weights import SpatialWeights, Tail, WeightKind

NearKind = Literal["features", "softmax"]
PartitionKind = Literal["chebyshev", "logarithmic", "foveal"]


class FarScale(nn.Module):
    """log c = a_n + ⟨u_n, q⟩: how much φ(q)·φ(k) counts beside exp(q·k), for each head n.

    Both start at 0.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, head_dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def forward(self, q: Tensor) -> Tensor:
        """Queries (…, N, D) → (…, N), in float32 or better."""
        with without_autocast(q):
            dtype = accumulation_dtype(q)
            product = torch.einsum("...nd,nd->...n", q.to(dtype), self.weight.to(dtype))
            return product + self.bias.to(dtype)


class FeatureHeads:
    """What all attention by features has: a feature map, and kernels that may replace parts.

    Attributes:
        fuse: Whether kernels may stand in for the feature map and the spatial weights, where they
            can run and compute the same.
    """

    fuse = True
    implementation = "auto"
    partition: Partition | None = None
    near: NearKind = "features"
    near_distance: int | None = None
    num_prefix_tokens = 0

    feature_map: Any
    head_dim: int

    def _feature_spec(self, q: Tensor) -> FeatureSpec | None:
        """What a kernel may compute of queries and keys like q; else the map runs, or refuses."""
        spec = spec_of(self.feature_map)
        return spec if spec is not None and self.feature_map._takes(q) else None

    def _weight_spec(self, v: Tensor) -> WeightSpec | None:
        return None

    def _uses_kernels(self, x: Tensor) -> bool:
        """Whether kernels may stand in for parts of the layer, if they can run."""
        asked = self.implementation.endswith("_triton")
        if self.implementation == "auto":
            asked = x.device.type == "cuda"
        able = asked and self.fuse and x.numel() > 0
        return able and not is_exporting() and not in_function_transform()

    def _problem(
        self, x: Tensor, features: FeatureSpec | None, weights: WeightSpec | None
    ) -> Problem:
        kind, radii = "", self._far_radii()
        num_features = getattr(self.feature_map, "num_features", 0)
        if features is not None:
            kind = features.activation if features.w1 is None else "sines"
            num_features = features.num_features
        return Problem(
            (x.shape[1], x.shape[2]),
            num_features,
            self.head_dim,
            radii,
            autocast_dtype(x) or x.dtype,
            x.device.type,
            dispatch.kernels_can_run(x.device.type, x.device.index),
            kind,
            "" if weights is None else "sticks" if weights.sticks else "softmax",
            self.head_dim,
            is_transformed(x),
            dispatch.shared_memory(x.device.type, x.device.index),
            None if self.near == "features" or not radii else radii[0],
            self.num_prefix_tokens,
            () if self.partition is None else self.partition.tile_radii,
            0 if self.partition is None else self.partition.tile,
        )

    def _far_radii(self) -> tuple[int, ...] | None:
        """The radii of the groups by features: near softmax takes those inside the first box."""
        if self.partition is None or self.near == "features":
            return None if self.partition is None else self.partition.radii
        radii = self.partition.radii
        near = radii[-1] if self.near_distance is None else self.near_distance
        return radii[radii.index(near) :]


class RippleCore(FeatureHeads):
    """Ripple attention between queries, keys and values: what its two layers share."""

    partition: Partition
    spatial_weights: SpatialWeights
    far_scale: FarScale
    eps: float
    scale: float | None = None

    def _set_up(
        self,
        num_heads: int,
        partition: Partition,
        weights: WeightKind,
        near: NearKind,
        near_distance: int | None,
        num_prefix_tokens: int,
        implementation: str,
        device: Device,
        dtype: torch.dtype | None,
        **of_weights: Any,
    ) -> None:
        """Makes all but the feature map."""
        check_choice("near", near, get_args(NearKind))
        if near_distance is not None:
            check_count("near_distance", near_distance, 0)
            if near == "features" or near_distance not in partition.radii:
                raise ValueError(
                    'near_distance is how far near="softmax" goes, one of the radii of the '
                    f"partition, here {partition.radii}; got {near_distance=}, {near=}. None takes "
                    "all its boxes."
                )
        check_count("num_prefix_tokens", num_prefix_tokens, 0)
        self.near, self.near_distance = near, near_distance
        self.num_prefix_tokens = num_prefix_tokens
        self.partition = partition
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        groups = (num_prefix_tokens > 0) + partition.num_groups
        self.spatial_weights = SpatialWeights(
            self.head_dim, num_heads, groups, weights, **of_weights, **made
        )
        if near == "softmax":
            self.far_scale = FarScale(self.head_dim, num_heads, **made)
        self.implementation = dispatch.check_implementation(implementation)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Queries, keys and values (B, H, W, N, D) → (B, H, W, N, D)."""
        return self._over_grid(*self._features(q, k, v), q, k, v, key_padding_mask)

    def attend_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        """Tokens in a row (B, P + H·W, N, D), those without a place first → the same shape.

        A token without a place sees all tokens alike: by softmax, or with near="features" as linear
        attention does. A mask may be of all tokens or of the grid's alone.
        """
        P = self.num_prefix_tokens
        masks = split_mask(key_padding_mask, v, grid_size, P)
        if masks is not None:
            k, v = (x.masked_fill(masks.all[..., None, None], 0) for x in (k, v))
        grid_q, grid_k, grid_v = (x[:, P:].unflatten(1, grid_size) for x in (q, k, v))
        grid_mask = None if masks is None else masks.grid
        if P == 0:
            return self.attend(grid_q, grid_k, grid_v, grid_mask).flatten(1, 2)
        if self.near == "softmax":
            phi_q, phi_k = self._features(grid_q, grid_k, grid_v)
            plain = self.implementation == "naive" or is_transformed(q, k, v)
            mask = None if masks is None else masks.all
            first = _softmax_over_all(q[:, :P], k, v, mask, self.scale, plain)
            first_k = k[:, :P]
        else:  # one call for all tokens: a random map draws once
            phi_q, phi_k = (x[:, 0] for x in self._features(q[:, None], k[:, None], v[:, None]))
            if masks is not None:
                phi_k = phi_k.masked_fill(masks.all[..., None, None], 0)
            first = _linear_over_all(phi_q[:, :P], phi_k, v, self.eps)
            first_k = phi_k[:, :P]
            phi_q, phi_k = (x[:, P:].unflatten(1, grid_size) for x in (phi_q, phi_k))
        prefix = {
            "prefix_k": first_k,
            "prefix_v": v[:, :P],
            "prefix_padding_mask": None if masks is None else masks.prefix,
        }
        rest = self._over_grid(phi_q, phi_k, grid_q, grid_k, grid_v, grid_mask, **prefix)
        return torch.cat([first.to(rest.dtype), rest.flatten(1, 2)], 1)

    def _features(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """φ(q) and φ(k), by a kernel where one may."""
        features = self._feature_spec(q) if self._uses_kernels(v) else None
        if features is None or dispatch.features_fuse(self._problem(v, features, None)):
            return self.feature_map(q, k)
        observe(self.feature_map, q, k)
        return fused_features(q, k, features)

    def _over_grid(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        **prefix: Tensor | None,
    ) -> Tensor:
        near = None
        if self.near == "softmax":
            near = NearSoftmax(q, k, self.far_scale(q), self.near_distance, self.scale)
        return ripple_attention(
            phi_q,
            phi_k,
            v,
            self._weights_of(v),
            partition=self.partition,
            near=near,
            key_padding_mask=key_padding_mask,
            implementation=self.implementation,
            eps=self.eps,
            **prefix,
        )

    def _weights_of(self, v: Tensor) -> Tensor:
        """α (B, H, W, N, G), by a kernel where one may."""
        spec = self._weight_spec(v) if self._uses_kernels(v) else None
        if spec is None or dispatch.weights_fuse(self._problem(v, None, spec)):
            return self.spatial_weights(v)
        observe(self.spatial_weights, v)
        return fused_weights(v, spec, spec.num_groups)

    def _weight_spec(self, v: Tensor) -> WeightSpec | None:
        """What a kernel may compute of values like v; else the module runs, or refuses."""
        spec: WeightSpec | None = spec_of(self.spatial_weights)
        if spec is None or not self.spatial_weights._takes(v):
            return None
        groups = (self.num_prefix_tokens > 0) + self.partition.num_groups
        return spec if spec.num_groups == groups else None

    @replaces(attend, _features, _over_grid, _weights_of)
    def _attend_fused(
        self, qkv: Tensor, mask: Tensor | None, features: FeatureSpec, weights: WeightSpec | None
    ) -> Tensor:
        v, radii, eps = qkv[:, :, :, 2], self.partition.radii, check_eps(self.eps)
        if weights is not None:
            observe(self.spatial_weights, v)
            return fused_ripple_attention(qkv, mask, features, weights, radii, eps)
        alpha = self.spatial_weights(v)
        check_weights(alpha, v, self.partition)
        alpha = drop_empty_groups(alpha, self.partition, mask)
        return fused_ripple_attention(qkv, mask, features, alpha, radii, eps)


class RippleHeads(RippleCore, nn.Module):
    """Ripple attention between given queries, keys and values, without projections.

    For attention layers that make q, k and v themselves, with norms or rotations of their own.

    Args:
        head_dim: D, the width of a head.
        num_heads: How many heads, N.
        max_distance, partition, weights, balanced, halt_threshold, tail: As in `RippleAttention`.
        near, near_distance, num_prefix_tokens, implementation: As in `RippleAttention`.
        feature_map, num_features, feature_map_options, eps: As in `RippleAttention`.
        device, dtype: Of the parameters, as in PyTorch's layers.
        scale: Factor on q·k for near="softmax", D^(−1/2) unless given.

    >>> import torch
    >>> heads = RippleHeads(32, num_heads=6, near="softmax", num_prefix_tokens=1)
    >>> q, k, v = torch.randn(3, 2, 1 + 14 * 14, 6, 32)
    >>> heads(q, k, v, grid_size=(14, 14)).shape
    torch.Size([2, 197, 6, 32])
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        max_distance: int = 4,
        partition: PartitionKind | Partition = "chebyshev",
        tile: int = 8,
        weights: WeightKind = "stick-breaking",
        balanced: bool = True,
        halt_threshold: float = 0.001,
        tail: Tail = "share",
        near: NearKind = "features",
        near_distance: int | None = None,
        scale: float | None = None,
        num_prefix_tokens: int = 0,
        feature_map: str | FeatureMap | None = None,
        num_features: int | None = None,
        feature_map_options: dict[str, Any] | None = None,
        eps: float = 1.0,
        implementation: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim)
        self.num_heads = check_count("num_heads", num_heads)
        self.scale = None if scale is None else check_number("scale", scale)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.feature_map = make_feature_map(
            default_feature_map(near) if feature_map is None else feature_map,
            head_dim,
            num_heads,
            num_features,
            feature_map_options,
            **made,
        )
        self.eps = check_eps(eps)
        self._set_up(
            num_heads,
            make_partition(partition, max_distance, tile),
            weights,
            near,
            near_distance,
            num_prefix_tokens,
            implementation,
            balanced=balanced,
            halt_threshold=halt_threshold,
            tail=tail,
            **made,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attends within each image.

        Args:
            q, k, v: Tokens in a row (B, P + H·W, N, D), the P prefix tokens first; already normed
                and rotated.
            grid_size: (H, W).
            key_padding_mask: Bool, True for padded tokens, which no token sees: of the grid (B, H,
                W) or (B, H·W), or of all tokens (B, P + H·W).

        Returns:
            (B, P + H·W, N, D).
        """
        self._check(q, k, v, grid_size)
        return self.attend_tokens(q, k, v, grid_size, key_padding_mask)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, grid_size: tuple[int, int]) -> None:
        P, (H, W) = self.num_prefix_tokens, check_pair("grid_size", grid_size, 0)
        for x in (q, k, v):
            if not holds_floats(x) or x.dim() != 4:
                raise ValueError(
                    f"q, k and v must be floating-point (B, L, N, D); got {describe(x)}. {REMEDY}"
                )
        alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
        shape = (v.shape[0], P + H * W, self.num_heads, self.head_dim)
        if not (alike and v.dim() == 4 and q.shape == k.shape == v.shape == shape):
            raise ValueError(
                "q, k and v must be tokens in a row (B, P + H·W, N, D), the prefix tokens first, "
                f"with P={P}, N={self.num_heads}, D={self.head_dim}, of one type and device; got "
                f"{grid_size=} and {describe(q)}; {describe(k)}; {describe(v)}. A grid becomes a "
                "row by x.flatten(1, 2)."
            )

    def extra_repr(self) -> str:
        own = f"radii={self.partition.radii}, near={self.near!r}, eps={self.eps}"
        return f"{own}, num_prefix_tokens={self.num_prefix_tokens}"


class Masks(NamedTuple):
    """A mask of padded tokens: of the grid (B, H, W), of prefix tokens (B, P), and of all."""

    grid: Tensor
    prefix: Tensor
    all: Tensor


def split_mask(
    mask: Tensor | None, v: Tensor, grid_size: tuple[int, int], prefix: int
) -> Masks | None:
    """Takes a mask of the grid's tokens (B, H, W) or (B, H·W), or of all (B, P + H·W)."""
    if mask is None:
        return None
    L = grid_size[0] * grid_size[1]
    known = [(v.shape[0], *grid_size), (v.shape[0], L), (v.shape[0], prefix + L)]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape not in known:
        got = f"{mask.dtype}, {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask)
        raise ValueError(
            "key_padding_mask must be bool, True for padded tokens, of shape "
            f"{', '.join(map(str, dict.fromkeys(known)))}; got {got}. A 0/1 mask needs .bool()."
        )
    mask = mask.flatten(1)
    if mask.shape[1] == L:
        mask = F.pad(mask, (prefix, 0))
    return Masks(mask[:, prefix:].unflatten(1, grid_size), mask[:, :prefix], mask)


def default_feature_map(near: NearKind) -> str:
    """`hedgehog` beside softmax, because it imitates exp(q·k)."""
    return "hedgehog" if near == "softmax" else "learned"


def make_feature_map(
    feature_map: str | FeatureMap,
    head_dim: int,
    num_heads: int,
    num_features: int | None,
    options: dict[str, Any] | None,
    **made: Any,
) -> FeatureMap:
    """A map by name, or the map itself."""
    if not isinstance(options, dict | None):
        raise TypeError(
            "feature_map_options must be a dict of the map's arguments; got "
            f"{shorten(options)}. As in {{'scaling': 'unit'}}."
        )
    if isinstance(feature_map, FeatureMap):
        if feature_map.head_dim != head_dim:
            raise ValueError(
                "a feature map takes the heads that it was made for; got "
                f"{feature_map.head_dim=} and heads of {head_dim} channels. "
                f"Make it with head_dim={head_dim}."
            )
        _check_made(feature_map, num_features, options)
        return feature_map
    if not isinstance(feature_map, str):
        raise TypeError(
            "feature_map is a name or a FeatureMap, which takes queries and keys; got "
            f"{feature_map!r}: derive it from ripple_attention.FeatureMap"
        )
    return create_feature_map(
        feature_map,
        head_dim,
        num_heads=num_heads,
        num_features=num_features,
        **made,
        **(options or {}),
    )


def make_partition(partition: str | Partition, max_distance: int, tile: int) -> Partition:
    """A partition by name, or the partition itself."""
    in_tiles = partial(foveal, tile=tile)
    known: dict[str, Callable[[int], Partition]] = {
        "chebyshev": chebyshev, "logarithmic": logarithmic, "foveal": in_tiles
    }  # fmt: skip
    if isinstance(partition, Partition):
        return partition
    if not isinstance(partition, str) or partition not in known:
        raise ValueError(
            f"partition must be one of {', '.join(known)} or a Partition; got {partition!r}"
        )
    return known[partition](max_distance)


def _check_made(
    feature_map: FeatureMap, num_features: int | None, options: dict[str, Any] | None
) -> None:
    """Refuses options that come too late for a map that is already made."""
    own = feature_map.num_features
    if num_features not in (None, own) or options:
        raise ValueError(
            "num_features and feature_map_options go with the name of a feature map; a FeatureMap "
            f"has its own; got {num_features=}, feature_map_options={options} with a "
            f"{type(feature_map).__name__} of {own} features. Leave them out, or make the map with "
            "them."
        )


def _softmax_over_all(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, by_definition: bool
) -> Tensor:
    """Softmax attention of a few queries (B, P, N, D) to all tokens (B, L, N, D)."""
    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    nothing = seen = None
    if mask is not None:
        nothing = mask.all(1)[:, None, None, None]  # then a softmax would be 0/0
        seen = ~mask[:, None, None, :] | nothing
    if by_definition:  # flash attention has no derivatives of derivatives, nor forward ones
        scores = queries @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        out = scores.softmax(-1) @ values
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, seen, scale=scale)
    if nothing is not None:
        out = out.masked_fill(nothing, 0)
    return out.transpose(1, 2)


def _linear_over_all(phi_q: Tensor, phi_k: Tensor, v: Tensor, eps: float) -> Tensor:
    """Linear attention of a few queries (B, P, N, M) to all tokens (B, L, N, ·)."""
    with without_autocast(v):
        queries, keys, values = (x.to(accumulation_dtype(v)) for x in (phi_q, phi_k, v))
        numerator = torch.einsum(
            "bpnm,bnme->bpne", queries, torch.einsum("blnm,blne->bnme", keys, values)
        )
        denominator = torch.einsum("bpnm,bnm->bpn", queries, keys.sum(1)).unsqueeze(-1) + eps
        return safe_divide(numerator, denominator).to(v.dtype)
