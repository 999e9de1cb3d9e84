"""Views of attention layers at work: their ripples, and how much each token counts for another."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ripple_attention.functional import linear_attention, ripple_attention
from ripple_attention.modules import GridAttention, LinearAttention, RippleAttention
from ripple_attention.ops.common import accumulation_dtype, safe_divide
from ripple_attention.partition import Partition
from ripple_attention.spatial_weights import SpatialWeights, halt, halt_group


@dataclass(frozen=True)
class Settings:
    """Settings that replace the trained ones; None keeps what the layer has.

    Attributes:
        max_distance: A smaller R_max. Rings from this distance on join the rest, which takes what
            is left of the stick. (A larger one means nothing: those sticks were not learned.)
        halt_threshold: Another τ: the ripple halts when less than this is left of the stick.
    """

    max_distance: int | None = None
    halt_threshold: float | None = None


AS_TRAINED = Settings()


@dataclass(frozen=True)
class LayerView:
    """One attention layer while it looked at some images.

    Attributes:
        name: Of the layer in the model, for example "blocks.0.attn".
        layer: The layer itself.
        q, k, v: Queries, keys and values (B, H, W, N, D), before the feature map.
        output: The result before the last projection (B, H, W, N, D).
        mask: Its key padding mask (B, H, W), if it had one.
        weights: Spatial weights (B, H, W, N, G); None for a layer without ripples, as the next two.
        halted: int64 (B, H, W, N), the group where each token halted; G means that it did not.
        partition: Whose groups they are.
    """

    name: str
    layer: GridAttention
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    mask: Tensor | None = None
    weights: Tensor | None = None
    halted: Tensor | None = None
    partition: Partition | None = None

    @property
    def kind(self) -> str:
        """ "ripple", "linear", "softmax", or the name of another class in full."""
        name = type(self.layer).__name__
        short = name.removesuffix("Attention").lower()
        return short if short in ("ripple", "linear", "softmax") else name

    @property
    def grid_size(self) -> tuple[int, int]:
        _, H, W, _, _ = self.v.shape
        return H, W

    def coefficients(self, row: int, column: int) -> Tensor:
        """How much each value counts in the output of the query at (row, column).

            out_i = Σ_j c_ij v_j,    c_ij = α(i,j) φq_i·φk_j ÷ (Σ_j α(i,j) φq_i·φk_j + eps)

        Returns:
            (B, N, H, W). With eps > 0 they add up to the query's `strength`.
        """
        if self.weights is not None and self.partition is not None:
            self.check_patch(row, column)
            groups = self.partition.groups((row, column), self.grid_size).to(self.weights.device)
            return self._normalised(row, column, self.weights[:, row, column][..., groups])
        if type(self.layer).attend is LinearAttention.attend:
            return self.linear_coefficients(row, column)
        self.check_patch(row, column)
        B, H, W, N, _ = self.v.shape
        one_hot = torch.eye(H * W, dtype=self.v.dtype, device=self.v.device)  # of every token
        values = one_hot.view(1, H, W, 1, H * W).expand(B, -1, -1, N, -1).contiguous()
        with torch.no_grad():
            out = type(self.layer).attend(self.layer, self.q, self.k, values, self.mask)
        return out[:, row, column].unflatten(-1, (H, W))

    def linear_coefficients(self, row: int, column: int) -> Tensor:
        """The same with linear attention: the same features, all rings alike."""
        self.check_patch(row, column)
        if not isinstance(self.layer, LinearAttention):
            raise ValueError(
                f"{self.name} is {type(self.layer).__name__}, which has no feature map: there is "
                "no linear attention to set beside it; use coefficients()"
            )
        return self._normalised(row, column, 1.0)

    def strength(self) -> Tensor:
        """What `eps` leaves of each query's mean of values, Σ_j c_ij = den ÷ (den + eps).

        A query that finds no key like itself is weak: its output fades out.

        Returns:
            (B, H, W, N), between 0 and 1 for features ≥ 0.
        """
        if not isinstance(self.layer, LinearAttention):
            raise ValueError(f"{self.name} is {type(self.layer).__name__}, which has no eps")
        ones, eps = torch.ones_like(self.v[..., :1]), self.layer.eps
        with torch.no_grad():
            phi_q, phi_k = self.layer.feature_map(self.q, self.k)
            if self.weights is None or self.partition is None:
                out = linear_attention(phi_q, phi_k, ones, key_padding_mask=self.mask, eps=eps)
            else:
                out = ripple_attention(
                    phi_q, phi_k, ones, self.weights, partition=self.partition,
                    key_padding_mask=self.mask, eps=eps,
                )  # fmt: skip
        return out.squeeze(-1)

    def active(self) -> Tensor:
        """How often each feature is not zero, over all queries and over all keys.

        Returns:
            (2, N, M). Learned features end in a ReLU, and one that is zero for all keys learns no
            more.
        """
        if not isinstance(self.layer, LinearAttention):
            raise ValueError(f"{self.name} is {type(self.layer).__name__}, which has no features")
        with torch.no_grad():
            features = self.layer.feature_map(self.q, self.k)
        return torch.stack([(x != 0).float().mean((0, 1, 2)) for x in features])

    def _normalised(self, row: int, column: int, weight: Tensor | float) -> Tensor:
        assert isinstance(self.layer, LinearAttention)
        with torch.no_grad():
            phi_q, phi_k = self.layer.feature_map(self.q, self.k)
            phi_q, phi_k = (x.to(accumulation_dtype(x)) for x in (phi_q, phi_k))
            if self.mask is not None:
                phi_k = phi_k.masked_fill(self.mask[..., None, None], 0)
            similarity = torch.einsum("bnm,bhwnm->bnhw", phi_q[:, row, column], phi_k)
            pairs = similarity * weight  # (B, N, H, W)
            return safe_divide(pairs, pairs.sum((-2, -1), keepdim=True) + self.layer.eps)

    def check_patch(self, row: int, column: int) -> None:
        """Refuses a query outside the grid."""
        H, W = self.grid_size
        if not (0 <= row < H and 0 <= column < W):
            raise ValueError(
                f"the patch must lie inside the grid, rows 0 to {H - 1} and columns 0 to {W - 1}; "
                f"got {row=}, {column=}"
            )


def shares(coefficients: Tensor) -> Tensor:
    """Coefficients (…, H, W) as shares of the whole, to look at: at least 0, adding up to 1."""
    positive = coefficients.clamp(min=0)  # the features of `rfa` may have negative products
    return safe_divide(positive, positive.sum((-2, -1), keepdim=True))


def weights_of(
    layer: RippleAttention,
    v: Tensor,
    settings: Settings = AS_TRAINED,
) -> tuple[Tensor, Tensor, Partition]:
    """The spatial weights of values (B, H, W, N, E), where they halted, and their partition.

    Without settings they are those that the layer computes.
    """
    module, partition = layer.spatial_weights, layer.partition
    weights, sticks = _whole_stick(module, v), module.kind in ("stick-breaking", "truncated")
    if settings.max_distance is not None and settings.max_distance <= partition.reach:
        radii = tuple(r for r in partition.radii if r < settings.max_distance)
        partition = Partition(radii or partition.radii[:1])
        kept = partition.num_groups - 1
        rest = weights[..., kept:].sum(-1, keepdim=True)
        weights = torch.cat([weights[..., :kept], rest], -1)
    threshold = module.halt_threshold
    if settings.halt_threshold is not None:
        threshold = settings.halt_threshold
    halted = torch.full_like(weights[..., 0], partition.num_groups, dtype=torch.int64)
    if sticks:
        halted = halt_group(weights, threshold, module.tail)
        weights = halt(weights, threshold, module.tail)
    if module.kind == "truncated":
        weights = nn.functional.pad(weights[..., :-1], (0, 1))
    return weights, halted, partition


def _whole_stick(module: SpatialWeights, v: Tensor) -> Tensor:
    """The weights before halting and truncation."""
    whole = copy.copy(module)  # shares its parameters
    whole.halt_threshold = 0.0
    if module.kind == "truncated":
        whole.kind = "stick-breaking"
    return whole.forward(v)


@contextmanager
def record_attention(
    model: nn.Module,
    settings: Settings = AS_TRAINED,
) -> Iterator[dict[str, LayerView]]:
    """Collects a `LayerView` of every attention layer of ours while the model runs.

    Yields:
        A dictionary that each forward pass fills, in the order of the layers. Results are unchanged
        unless settings are given. Fused kernels are not used, and compiled models are not seen.

    >>> layer = RippleAttention(32, num_heads=2)
    >>> with record_attention(layer) as views, torch.no_grad():
    ...     _ = layer(torch.randn(1, 5, 7, 32))
    >>> views[""].coefficients(4, 6).shape
    torch.Size([1, 2, 5, 7])
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, GridAttention)}
    if not layers:
        raise ValueError(
            "there is nothing to look at: the model has no RippleAttention, LinearAttention or "
            f"SoftmaxAttention of this package; got {type(model).__name__}. Use one of "
            "`ripple models`, or put such layers into yours."
        )
    views: dict[str, LayerView] = {}
    before = {name: vars(layer).get("fuse") for name, layer in layers.items()}
    for name, layer in layers.items():
        vars(layer)["attend"] = partial(_attend, views, name, layer, settings)
        vars(layer)["fuse"] = False
    try:
        yield views
    finally:
        for name, layer in layers.items():
            vars(layer).pop("attend")
            vars(layer).pop("fuse")
            if before[name] is not None:
                vars(layer)["fuse"] = before[name]


def _attend(
    views: dict[str, LayerView],
    name: str,
    layer: GridAttention,
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Replaces `layer.attend`, and keeps its inputs and output."""
    weights = halted = partition = None
    if isinstance(layer, RippleAttention):
        weights, halted, partition = weights_of(layer, v, settings)
    if weights is None or partition is None or settings == AS_TRAINED:
        out = type(layer).attend(layer, q, k, v, mask)
    else:
        assert isinstance(layer, RippleAttention)
        phi_q, phi_k = layer.feature_map(q, k)
        out = ripple_attention(
            phi_q, phi_k, v, weights, partition=partition, key_padding_mask=mask, eps=layer.eps
        )
    views[name] = LayerView(name, layer, q, k, v, out, mask, weights, halted, partition)
    return out
