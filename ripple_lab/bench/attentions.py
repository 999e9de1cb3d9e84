"""The attention layers that `ripple bench layer` compares, and what they are by definition."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from ripple_attention.feature_maps import FEATURE_MAPS
from ripple_attention.modules import (
    GridAttention,
    LinearAttention,
    RippleAttention,
    SoftmaxAttention,
)
from ripple_attention.spatial_weights import WeightKind

Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # rows and columns of query and key

FLOOR = "floor: projections alone"
WINDOW, RADIUS = 14, 3  # of windows, and of a 7×7 neighbourhood
MAPS = ("learned", "elu", "relu", "t2r", "hedgehog")
WEIGHTS: tuple[WeightKind, ...] = get_args(WeightKind)
SCORES_AT_ONCE = 2**26  # of attention by definition


@dataclass(frozen=True)
class Shape:
    """What a layer takes: (batch, height, width, dim), of so many heads."""

    height: int
    width: int
    batch: int
    dim: int
    heads: int

    @property
    def tokens(self) -> int:
        return self.height * self.width

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens × {self.batch}, {self.dim}/{self.heads}"


class ProjectionsAlone(GridAttention):
    """What all systems have in common, without attention: a token gets its own value."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return v


class WindowAttention(SoftmaxAttention):
    """Softmax attention within windows, as in ViTDet and SAM.

    The grid is padded with zeros before the projections. Padded tokens are attended to like others,
    and their outputs are cut off.
    """

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        (B, H, W, C), S = x.shape, WINDOW
        x = pad(x)
        rows, columns = x.shape[1] // S, x.shape[2] // S
        windows = x.view(B, rows, S, columns, S, C).transpose(2, 3).reshape(-1, S, S, C)
        out = super().forward(windows).view(B, rows, columns, S, S, C).transpose(2, 3)
        return out.reshape(x.shape)[:, :H, :W].contiguous()


class FlexAttention(SoftmaxAttention):
    """Softmax attention to a neighbourhood, clipped at the border, by FlexAttention."""

    def __init__(self, shape: Shape, compiled: bool = True):
        super().__init__(shape.dim, shape.heads)
        self.grid_size = shape.height, shape.width
        self.blocks: Any = None
        if compiled:  # beyond its limit PyTorch silently stops compiling
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        if self.blocks is None:
            H, W = self.grid_size

            def sees(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return near(i // W, i % W, j // W, j % W)

            self.blocks = create_block_mask(sees, None, None, H * W, H * W, device=str(q.device))
        queries, keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))
        out = self.flex(queries, keys, values, block_mask=self.blocks)
        return out.transpose(1, 2).reshape(v.shape)


class ByDefinition(GridAttention):
    """Softmax attention of all pairs that see each other, some queries at a time."""

    def __init__(self, dim: int, heads: int, seen: Seen | None = None, padded: bool = False):
        super().__init__(dim, heads)
        self.seen, self.padded = seen, padded

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        H, W = x.shape[1:3]
        return super().forward(pad(x) if self.padded else x)[:, :H, :W]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        queries, keys, values = (x.flatten(1, 2).transpose(1, 2) for x in (q, k, v))  # (B, N, L, D)
        width, tokens = q.shape[2], torch.arange(queries.shape[2], device=q.device)

        def part(queries: Tensor, i: Tensor) -> Tensor:
            scores = queries @ keys.mT * self.head_dim**-0.5
            if self.seen is not None:
                rows, columns = i[:, None] // width, i[:, None] % width
                seen = self.seen(rows, columns, tokens // width, tokens % width)
                scores = scores.masked_fill(~seen, -torch.inf)
            return scores.softmax(-1).to(v.dtype) @ values

        size = max(1, SCORES_AT_ONCE // keys[..., 0].numel())
        pieces = zip(queries.split(size, 2), tokens.split(size), strict=True)
        out = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
        return torch.cat(out, 2).transpose(1, 2).reshape(v.shape)


def pad(x: Tensor) -> Tensor:
    """A grid of whole windows, zeros below and on the right."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % WINDOW, 0, -x.shape[1] % WINDOW))


def near(row: Tensor, column: Tensor, other_row: Tensor, other_column: Tensor) -> Tensor:
    return ((row - other_row).abs() <= RADIUS) & ((column - other_column).abs() <= RADIUS)


def same_window(row: Tensor, column: Tensor, other_row: Tensor, other_column: Tensor) -> Tensor:
    same_row = row // WINDOW == other_row // WINDOW
    return same_row & (column // WINDOW == other_column // WINDOW)


@dataclass(frozen=True)
class System:
    """A layer to time, its definition, and why it cannot run, if so."""

    make: Callable[[Shape], GridAttention]
    define: Callable[[Shape], GridAttention] | None = None  # None: unchecked
    refusal: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def systems(
    reaches: tuple[int, ...] = (4, 8),
    maps: tuple[str, ...] = MAPS,
    weights: tuple[WeightKind, ...] = WEIGHTS,
    device: str = "cpu",
) -> dict[str, System]:
    """Every system by name; ripple layers vary one thing at a time from the first."""

    def softmax(seen: Seen | None, padded: bool = False) -> Callable[[Shape], GridAttention]:
        return lambda shape: ByDefinition(shape.dim, shape.heads, seen, padded)

    on_gpu = torch.device(device).type == "cuda"
    flex = "" if on_gpu else "skipped: FlexAttention has no backward pass on a CPU"
    known = {
        "softmax": System(lambda shape: SoftmaxAttention(shape.dim, shape.heads), softmax(None)),
        f"windows {WINDOW}": System(
            lambda shape: WindowAttention(shape.dim, shape.heads), softmax(same_window, padded=True)
        ),
        f"flex {2 * RADIUS + 1}x{2 * RADIUS + 1}": System(FlexAttention, softmax(near), flex),
        "linear": System(partial(linear, True), partial(linear, False)),
    }
    base = reaches[0], maps[0], weights[0]
    variants = [(reach, *base[1:]) for reach in reaches]
    variants += [(base[0], name, base[2]) for name in maps[1:]]
    variants += [(*base[:2], kind) for kind in weights[1:]]
    for reach, name, kind in variants:
        words = [f"ripple R {reach}", *([name] if name != "learned" else [])]
        words += [f"{kind} weights"] if kind != "stick-breaking" else []
        known[", ".join(words)] = System(
            partial(ripple, reach, name, kind, "auto"),
            partial(ripple, reach, name, kind, "naive"),
            "" if name in FEATURE_MAPS else f"skipped: there is no feature map {name!r}",
            {"max_distance": reach, "feature_map": name, "weights": kind},
        )
    return known | {FLOOR: System(lambda shape: ProjectionsAlone(shape.dim, shape.heads))}


def linear(fuse: bool, shape: Shape) -> LinearAttention:
    layer = LinearAttention(shape.dim, shape.heads)
    layer.fuse = fuse
    return layer


def ripple(
    reach: int, feature_map: str, weights: WeightKind, implementation: str, shape: Shape
) -> RippleAttention:
    return RippleAttention(
        shape.dim,
        shape.heads,
        max_distance=reach,
        feature_map=feature_map,
        weights=weights,
        implementation=implementation,
    )
