"""Attention layers with one signature: swap softmax for linear for ripple attention and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ripple_attention import dispatch
from ripple_attention.checks import (
    REMEDY,
    check_count,
    check_dtype,
    check_flag,
    check_module,
    check_number,
    describe,
    holds_floats,
    shorten,
)
from ripple_attention.feature_maps import FeatureMap
from ripple_attention.functional import check_eps, linear_attention
from ripple_attention.fusion import (
    FeatureSpec,
    Observer,
    WeightSpec,
    observe,
    replaces,
    replaces_own,
    runs_own_code,
)
from ripple_attention.heads import (
    FeatureHeads,
    NearKind,
    PartitionKind,
    RippleCore,
    default_feature_map,
    make_feature_map,
    make_partition,
)
from ripple_attention.operands import check_mask
from ripple_attention.ops.common import autocast_dtype, without_padding
from ripple_attention.ops.fused import fused_linear_attention
from ripple_attention.partition import Partition
from ripple_attention.spatial_weights import SpatialWeights, Tail, WeightKind

CLASS_TOKEN = (
    "A class token has no place on the grid: pool the tokens instead, or make a ripple layer with "
    "num_prefix_tokens=1."
)


class GridAttention(nn.Module):
    """Multi-head self-attention over a grid of tokens; subclasses say how tokens are weighed.

    Parameters are named as in timm: `qkv` (3·dim × dim, queries then keys then values) and `proj`.

    Args:
        dim: C, channels in and out.
        num_heads: N; divides `dim`.
        qkv_bias: Whether `qkv` has a bias.
        proj_drop: Dropout after `proj`.
        device, dtype: Of the parameters, as in PyTorch's layers.
    """

    needs_grid = False
    num_prefix_tokens = 0

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
        *,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if check_count("dim", dim) % check_count("num_heads", num_heads):
            raise ValueError(
                f"num_heads must divide dim; got {dim=}, {num_heads=}. Heads of 32 or 64 channels "
                "are usual."
            )
        check_flag("qkv_bias", qkv_bias)
        check_number("proj_drop", proj_drop, 0, 1)
        check_dtype(dtype)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        value: Tensor | None = None,
        *,
        grid_size: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attends within each image.

        Args:
            x: What queries and keys are made of: (B, H, W, C), or (B, L, C) with `grid_size`.
            value: What values are made of, in the shape of x; x itself unless given. (A detector
                adds positions to x and not to the values.)
            grid_size: (H, W) with H·W = L, for tokens in a row.
            key_padding_mask: Bool (B, H, W) or (B, L), True for padded tokens, which no token sees.

        Returns:
            In the shape of x.
        """
        self._check(x, value, grid_size)
        shape = x.shape
        if x.dim() == 3:
            grid_size = grid_size or (1, x.shape[1])
            if isinstance(key_padding_mask, Tensor) and key_padding_mask.shape == shape[:2]:
                key_padding_mask = key_padding_mask.unflatten(1, grid_size)
            x = x.unflatten(1, grid_size)
            value = None if value is None else value.unflatten(1, grid_size)
        out = self._between_projections(x, value, key_padding_mask)  # (B, H, W, N, E)
        return self.proj_drop(self.proj(out.flatten(3))).view(shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Queries, keys and values (B, H, W, N, D) → (B, H, W, N, D)."""
        raise NotImplementedError

    def _between_projections(
        self, x: Tensor, value: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        q, k, v = self._project(x, value)
        check_mask(key_padding_mask, v)
        if key_padding_mask is not None:  # so NaNs in the padding cannot leak
            k, v = without_padding(k, v, key_padding_mask)
        return self.attend(q, k, v, key_padding_mask)

    def _project(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        heads = (3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).unflatten(-1, heads).unbind(-3)
        if value is not None:  # the whole module again, with whatever a user changed in it
            v = self.qkv(value).unflatten(-1, heads).select(-3, 2)
        return q, k, v

    def _check(self, x: Tensor, value: Tensor | None, grid_size: tuple[int, int] | None) -> None:
        dim = self.num_heads * self.head_dim
        name = type(self).__name__
        if not holds_floats(x) or x.dim() not in (3, 4) or x.shape[-1] != dim:
            raise ValueError(
                f"{name} takes floating-point x as (B, H, W, {dim}) or (B, L, {dim}); "
                f"got x.{describe(x)}. {REMEDY}"
            )
        weight = getattr(self.proj, "weight", None)  # a quantised one's is no tensor
        own = weight.dtype if isinstance(weight, Tensor) else x.dtype
        if x.dtype != own and own.is_floating_point and autocast_dtype(x) is None:
            raise ValueError(
                f"x must have the dtype of {name}'s weights, unless autocast is on; got {x.dtype=} "
                f"and weights of {own}. Convert one of them: x.to({own}) or layer.to({x.dtype})"
            )
        there = weight.device if isinstance(weight, Tensor) else x.device
        # A hook of the projection may bring the two together.
        if x.device != there and runs_own_code(self.proj, nn.Linear):
            raise ValueError(
                f"x must be on the device of {name}'s weights; got {str(x.device)=} and weights on "
                f"{there}. Move one of them: x.to(...) or layer.to(...)."
            )
        if value is not None and not holds_floats(value):
            pair = isinstance(value, tuple | list) and len(value) == 2
            remedy = f"The size of a grid goes by name: grid_size={value}." if pair else REMEDY
            raise ValueError(
                f"value must be a tensor in the shape of x; got value={describe(value)}. {remedy}"
            )
        if value is not None:
            other_type = value.dtype != x.dtype and autocast_dtype(x) is None
            if other_type or value.shape != x.shape or value.device != x.device:
                raise ValueError(
                    "value must have the shape and device of x, and its type unless autocast is "
                    f"on; got value.{describe(value)} and x.{describe(x)}. Left out, it is x."
                )
        if x.dim() == 3 and grid_size is None and self.needs_grid:
            raise ValueError(
                f"{name} needs to know where tokens lie: pass (B, H, W, C), or grid_size=(H, W) "
                f"with (B, L, C); got x.shape={tuple(x.shape)} and {grid_size=}. {CLASS_TOKEN}"
            )
        P = self.num_prefix_tokens
        if P and x.dim() != 3:
            raise ValueError(
                f"{name} with {P} prefix tokens takes tokens in a row (B, {P} + H·W, {dim}) and "
                f"grid_size=(H, W); got x.shape={tuple(x.shape)}"
            )
        if grid_size is None:
            return
        pair = isinstance(grid_size, tuple | list) and len(grid_size) == 2
        pair = pair and all(isinstance(x, int | torch.SymInt) and x >= 0 for x in grid_size)
        size = x.shape[1] - P if x.dim() == 3 else tuple(x.shape[1:3])
        if not pair or size not in (grid_size[0] * grid_size[1], tuple(grid_size)):
            one_more = pair and size == grid_size[0] * grid_size[1] + 1
            raise ValueError(
                f"grid_size=(H, W) must hold the tokens of x, {f'{P} + ' * (P > 0)}H·W = L; got "
                f"grid_size={shorten(grid_size)} and x.shape={tuple(x.shape)}. "
                + (CLASS_TOKEN if one_more else "Two whole numbers, rows before columns.")
            )


class SoftmaxAttention(GridAttention):
    """Softmax attention by `scaled_dot_product_attention`.

    Args:
        attn_drop: Dropout of the attention probabilities.
        dim, num_heads, qkv_bias, proj_drop, device, dtype: As in `GridAttention`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            dim, num_heads, qkv_bias=qkv_bias, proj_drop=proj_drop, device=device, dtype=dtype
        )
        self.attn_drop = check_number("attn_drop", attn_drop, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        queries, keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))  # (B, N, L, D)
        mask = None
        if key_padding_mask is not None:
            mask = ~key_padding_mask.flatten(1)[:, None, None, :]
        dropout = self.attn_drop if self.training else 0.0
        out = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
        return out.transpose(1, 2).reshape(v.shape)


class LinearAttention(FeatureHeads, GridAttention):
    """Linear attention: φ(q)·φ(k) in place of the exponential, so that keys are summed once.

    Args:
        feature_map: Name of φ, see `create_feature_map`; or a `FeatureMap` of your own, which has
            its width, options, device and dtype already.
        num_features: M, the width of φ; None for the map's own.
        feature_map_options: Further arguments of the map, as {"scaling": "scaled"}.
        eps: Added to the denominator, so that the output of a query whose features are nearly all
            0 fades out instead of blowing up. 0 is the paper's definition.
        attn_drop: Must be 0: there is no matrix of probabilities to drop from.
        dim, num_heads, qkv_bias, proj_drop, device, dtype: As in `GridAttention`.

    Attributes:
        fuse: Whether kernels may stand in for the feature map and the spatial weights, where they
            can run and compute the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
        *,
        feature_map: str | FeatureMap = "learned",
        num_features: int | None = None,
        feature_map_options: dict[str, Any] | None = None,
        eps: float = 1.0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            dim, num_heads, qkv_bias=qkv_bias, proj_drop=proj_drop, device=device, dtype=dtype
        )
        if attn_drop != 0:
            raise ValueError(
                f"{type(self).__name__} forms no matrix of probabilities to drop from, so "
                f"attn_drop must be 0; got attn_drop={shorten(attn_drop)}. Use proj_drop, which "
                "drops from the output."
            )
        self.feature_map = make_feature_map(
            feature_map,
            self.head_dim,
            num_heads,
            num_features,
            feature_map_options,
            device=device,
            dtype=dtype,
        )
        self.eps = check_eps(eps)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        phi_q, phi_k = self.feature_map(q, k)
        return linear_attention(phi_q, phi_k, v, key_padding_mask=key_padding_mask, eps=self.eps)

    def explain(self, x: Tensor, *, grid_size: tuple[int, int] | None = None) -> str:
        """Prints what would run for x, and why nothing else; returns its name.

        Args:
            x: (B, H, W, C), or tokens in a row, prefix tokens first, with `grid_size`.
            grid_size: (H, W).
        """
        self._check(x, None, grid_size)
        if x.dim() == 3:
            if grid_size is None:
                raise ValueError(
                    f"explain takes x as (B, H, W, C); got x.shape={tuple(x.shape)}. For tokens in "
                    "a row use x.unflatten(1, (H, W)), or pass grid_size=(H, W)."
                )
            x = x[:, self.num_prefix_tokens :].unflatten(1, grid_size)
        fuses = self._uses_kernels(x) and self._attends_as_written()
        like = x.new_empty(0, self.num_heads, self.head_dim)
        specs = (self._feature_spec(like), self._weight_spec(like)) if fuses else (None, None)
        return dispatch.explain(self._problem(x, *specs), self.implementation)

    def _between_projections(
        self, x: Tensor, value: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        qkv = None  # projections first: a GPU computes them while the rest is decided
        if value is None and key_padding_mask is None:
            qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
            q, k, v = qkv.unbind(3)
        else:
            q, k, v = self._project(x, value)
            check_mask(key_padding_mask, v)
            if key_padding_mask is not None:
                k, v = without_padding(k, v, key_padding_mask)
        if not (self._uses_kernels(x) and self._attends_as_written()):
            return self.attend(q, k, v, key_padding_mask)
        features = self._feature_spec(q)
        if features is None:
            return self.attend(q, k, v, key_padding_mask)
        weights = self._weight_spec(v)
        problem = self._problem(x, features, weights)
        if dispatch.choose(problem, self.implementation) != "fused":
            return self.attend(q, k, v, key_padding_mask)
        if v.dtype != problem.dtype:  # from a projection of a user's own
            return self.attend(q, k, v, key_padding_mask)
        if qkv is None:
            qkv = torch.stack([q, k, v], 3)
        observe(self.feature_map, q, k)
        return self._attend_fused(qkv, key_padding_mask, features, weights)

    @replaces(attend)
    def _attend_fused(
        self, qkv: Tensor, mask: Tensor | None, features: FeatureSpec, weights: WeightSpec | None
    ) -> Tensor:
        """What `attend` computes, all of it by kernels, from qkv (B, H, W, 3, N, D)."""
        return fused_linear_attention(qkv, mask, features, check_eps(self.eps))

    def _attends_as_written(self) -> bool:
        return replaces_own(self, type(self)._attend_fused)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class RippleAttention(RippleCore, LinearAttention):
    """Ripple attention: linear attention in which every query learns how much each ring counts.

    Args:
        max_distance: R_max ≥ 1. Tokens at this distance and beyond are one group, the rest. (With
            the logarithmic partition, the distance that its rings cover.)
        partition: "chebyshev" for rings one token thick, "logarithmic" for rings that double,
            "foveal" for rings one token thick and coarse ones of tiles beyond, or a `Partition`,
            which replaces `max_distance`.
        tile: Rows and columns of the tiles of foveal rings; no other partition has any.
        weights: Kind of spatial weights, see `SpatialWeights`.
        balanced: Whether weights start uniform (or as 1/2, 1/4, …), see `stick_breaking`.
        halt_threshold: τ, what is left of the stick when the ripple halts; see `halt`.
        tail: How the halted groups share, see `halt`.
        near: "features" for the paper's φ(q)·φ(k) everywhere; "softmax" for exp(q·k) inside the
            last box, as a pretrained softmax layer has it, and features beyond, on a learned scale
            (`far_scale`). `eps` is not used then.
        near_distance: How far "softmax" goes, one of the partition's radii; None for all of them.
        num_prefix_tokens: P tokens in front of the grid's that have no place on it (class,
            register or text tokens). Every query sees them as a group of their own, the first stick
            of the weights; they see all tokens alike.
        feature_map: As in `LinearAttention`; None for "learned", or "hedgehog" beside softmax.
        implementation: As in `ripple_attention`.
        dim, num_heads, qkv_bias, attn_drop, proj_drop, device, dtype: As in `LinearAttention`.
        num_features, feature_map_options, eps: As in `LinearAttention`.

    >>> import torch
    >>> layer = RippleAttention(192, num_heads=6, max_distance=4)
    >>> layer(torch.randn(2, 14, 14, 192)).shape
    torch.Size([2, 14, 14, 192])
    """

    needs_grid = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
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
        num_prefix_tokens: int = 0,
        feature_map: str | FeatureMap | None = None,
        num_features: int | None = None,
        feature_map_options: dict[str, Any] | None = None,
        eps: float = 1.0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        implementation: str = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            dim,
            num_heads,
            feature_map=default_feature_map(near) if feature_map is None else feature_map,
            num_features=num_features,
            feature_map_options=feature_map_options,
            eps=eps,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            device=device,
            dtype=dtype,
        )
        self._set_up(
            num_heads,
            make_partition(partition, max_distance, tile),
            weights,
            near,
            near_distance,
            num_prefix_tokens,
            implementation,
            device,
            dtype,
            balanced=balanced,
            halt_threshold=halt_threshold,
            tail=tail,
        )

    def forward(
        self,
        x: Tensor,
        value: Tensor | None = None,
        *,
        grid_size: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """As in `GridAttention`. With prefix tokens, x is (B, P + H·W, C) with the prefix tokens
        first, `grid_size` is needed, and a mask is of all tokens (B, P + H·W) or the grid's alone.
        """
        if self.num_prefix_tokens == 0:
            return super().forward(x, value, grid_size=grid_size, key_padding_mask=key_padding_mask)
        self._check(x, value, grid_size)
        assert grid_size is not None
        q, k, v = self._project(x, value)
        out = self.attend_tokens(q, k, v, grid_size, key_padding_mask)
        return self.proj_drop(self.proj(out.flatten(2)))

    def extra_repr(self) -> str:
        partition, name = self.partition, self.implementation
        more = f", near={self.near!r}" if self.near != "features" else ""
        more += f", num_prefix_tokens={self.num_prefix_tokens}" if self.num_prefix_tokens else ""
        rings = f"radii={partition.radii}"
        if partition.tile:
            rings += f", tile={partition.tile}, tile_radii={partition.tile_radii}"
        return f"{rings}, implementation={name!r}, {super().extra_repr()}{more}"


@contextmanager
def record_spatial_weights(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Collects the spatial weights of every ripple layer while the model runs, results unchanged.

    Yields:
        A dictionary that each forward pass fills: name of the layer → weights (B, H, W, N, G),
        detached. Compiled models run their own code and are not seen: record the eager model.

    >>> import torch
    >>> layer = RippleAttention(32, num_heads=2)
    >>> with record_spatial_weights(layer) as weights:
    ...     _ = layer(torch.randn(1, 8, 8, 32))
    >>> {name: tuple(w.shape) for name, w in weights.items()}
    {'spatial_weights': (1, 8, 8, 2, 5)}
    """
    recorded: dict[str, Tensor] = {}
    handles = []
    check_module("model", model)
    if not any(isinstance(module, SpatialWeights) for module in model.modules()):
        raise ValueError(
            "record_spatial_weights needs a model with RippleAttention layers; "
            f"got {type(model).__name__}, which has none. `ripple models` lists models that do"
        )
    for name, module in model.named_modules():
        if isinstance(module, SpatialWeights):

            def keep(weights: Tensor, name: str = name) -> None:
                recorded[name] = weights.detach()

            handles.append(module.register_forward_hook(Observer(keep)))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
