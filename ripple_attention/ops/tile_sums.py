"""A near window, and wide boxes by sums that the queries of a tile share, in PyTorch operations.

By parts, Σ_g α_g Σ_{group g} = α_rest · whole + Σ_g (α_g − α_{g+1}) box_g. Boxes smaller than a
tile are a window, as in `ops/tiled.py`, of weights relative to the first group beyond it; wider
ones, and those of coarse rings, are read by `ops/box_sums.py`, and a box that holds the grid is the
whole. Nothing is kept for the backward pass but the inputs, the output and the denominator.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention.ops import tiled
from ripple_attention.ops.box_sums import Reader, add_box_sums, add_tile_box_sums, tile_states
from ripple_attention.ops.common import accumulation_dtype, flush_cancellation, parts, safe_divide
from ripple_attention.partition import Partition

TILE = 8

# Numbers in the states of one row of tiles, and in what else is large at a time.
NUMBERS_ON_CPU = 2**22
NUMBERS_ELSEWHERE = 2**27


class Plan(NamedTuple):
    """How the groups of a partition are summed on a grid.

    Args:
        near: Radii of the window: groups 0 … len(near) − 1.
        boxes: The groups that follow end with a box each, of this radius.
        tile: Rows and columns of a tile.
        coarse: Whether radii of boxes count tiles.
    """

    near: tuple[int, ...]
    boxes: tuple[int, ...]
    tile: int
    coarse: bool

    @property
    def rest(self) -> int:
        """The group outside the last box; no token of the grid is in those after it."""
        return len(self.near) + len(self.boxes)

    def read(self, n: int, a: Tensor, b: Tensor, states: Tensor | None, *readers: Reader) -> None:
        """Adds to every reader's total what it reads of its box n."""
        if self.coarse and states is not None:
            add_tile_box_sums(readers, self.boxes[n], self.tile, states)
        else:
            add_box_sums(a, b, readers, self.boxes[n], self.tile, states)

    def states(self, a: Tensor, b: Tensor) -> Tensor:
        return tile_states(a, b, self.tile)


def make_plan(bounds: Sequence[int], height: int, width: int) -> Plan:
    """Which boxes are a window, and which hold the whole grid and need no sum of their own."""
    partition, last = Partition.from_bounds(bounds), max(height, width) - 1
    tile = partition.tile or TILE
    near = tuple(r for r in partition.radii if r < min(tile, last))
    boxes = tuple(r for r in partition.radii if tile <= r < last)
    if partition.tile and partition.reach < last:
        boxes = tuple(r for r in partition.tile_radii if r < last // tile)
    return Plan(near, boxes, tile, bool(partition.tile))


def tile_sums_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, bounds: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by a window and shared sums. Arguments as in `ripple_naive`.

    Returns:
        The output (B, H, W, N, E) in the type of v, and the denominators, eps included,
        (B, H, W, N) in float32 or better.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
    plan = make_plan(bounds, *v.shape[1:3])
    for part in _parts(q, v, plan):
        queries, keys, values, weights = (x[part] for x in (q, k, v, spatial_weights))
        values = F.pad(values, (0, 1), value=1)
        sums, magnitude = _far(_far_sums, plan, queries, keys, values, weights)
        near_weights = _near_weights(weights, plan)
        for strip, groups, key_tiles in _window(plan, keys, values):
            pairs = torch.bmm(strip.query_tiles(queries), key_tiles[0].mT)
            pairs *= tiled._pair_weights(strip.query_tiles(near_weights), groups)
            near = strip.untile_queries(torch.bmm(pairs, key_tiles[1]), keys.shape[3])
            sums[:, strip.rows] += near
            magnitude[:, strip.rows] += near[..., -1:].abs()
        below = flush_cancellation(sums[..., -1:] + eps, magnitude)
        out[part] = safe_divide(sums[..., :-1], below)
        denominator[part] = below.squeeze(-1)
    return out, denominator


def tile_sums_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    bounds: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `tile_sums_forward` for q, k, v and the weights, each in the type of its input.

    With y'_i = [∂o_i, −∂o_i·o_i]/den_i, queries read the boxes again, against y' instead of φ(q).
    And as i is in group g of j just when j is in group g of i, keys read α φ(q)y'ᵀ in the same way.
    """
    inputs = (q, k, v, spatial_weights)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    plan = make_plan(bounds, *v.shape[1:3])
    for part in _parts(q, v, plan):
        queries, keys, values, weights = (x[part] for x in (q, k, v, spatial_weights))
        values = F.pad(values, (0, 1), value=1)
        y = grad[part] * safe_divide(1, denominator[part]).unsqueeze(-1)
        y = torch.cat([y, -(y * out[part]).sum(-1, keepdim=True)], -1)
        totals = _far(_far_gradients, plan, queries, keys, values, weights, y)
        _add_near_gradients(totals, queries, keys, values, weights, y, plan)
        for result, total in zip(grads, totals, strict=True):
            result[part] = total[..., : result.shape[-1]]
    return grads[0], grads[1], grads[2], grads[3]


def _far(function: Callable[..., list[Tensor]], plan: Plan, *inputs: Tensor) -> list[Tensor]:
    """What a function makes of the whole grid and the wide boxes, on the grid (B, H, W, N, C).

    It is called with the inputs rows first, and for boxes around tokens again, with the grid
    transposed and `upright` false, for the columns beside the cores of boxes.
    """
    B, H, W, N, _ = inputs[0].shape
    results = function(plan, True, *(_rows_first(x, plan.tile) for x in inputs))
    results = [_heads_last(x, B, H, W, N) for x in results]
    if plan.boxes and not plan.coarse:
        turned = (_rows_first(x.transpose(1, 2), plan.tile) for x in inputs)
        for total, part in zip(results, function(plan, False, *turned), strict=True):
            total += _heads_last(part, B, W, H, N).transpose(1, 2)
    return results


def _far_sums(
    plan: Plan, upright: bool, queries: Tensor, keys: Tensor, values: Tensor, alpha: Tensor
) -> list[Tensor]:
    """Numerators and denominators (H, P, W, E+1), and the size of the sums that make up the latter
    (H, P, W, 1).
    """
    states, sums = None, torch.zeros_like(values)
    if upright:
        states = plan.states(keys, values)
        whole = torch.einsum("hpwm,pme->hpwe", queries, states.sum((0, 2)))
        sums.addcmul_(alpha[..., plan.rest, None], whole)
    magnitude = sums[..., -1:].abs()
    scaled = torch.empty_like(queries)
    for n in range(len(plan.boxes)):
        before = sums[..., -1:].clone()
        torch.mul(queries, _step(alpha, plan, n), out=scaled)
        plan.read(n, keys, values, states, Reader(scaled, sums))
        magnitude += (sums[..., -1:] - before).abs_()
    return [sums, magnitude]


def _far_gradients(
    plan: Plan,
    upright: bool,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    alpha: Tensor,
    y: Tensor,
) -> list[Tensor]:
    """Gradients for q, k, v' and the weights, (H, P, W, …)."""
    inputs, states = (queries, keys, values, alpha), None
    grad_q, grad_k, grad_v, grad_weights = grads = [torch.zeros_like(x) for x in inputs]
    if upright:
        states, rest = plan.states(keys, values), alpha[..., plan.rest, None]
        pulls = torch.einsum("hpwe,pme->hpwm", y, states.sum((0, 2)))
        grad_q.addcmul_(rest, pulls)
        grad_weights[..., plan.rest] = (queries * pulls).sum(-1)
        state = torch.einsum("hpwm,hpwe->pme", rest * queries, y)
        grad_k += torch.einsum("hpwe,pme->hpwm", values, state)
        grad_v += torch.einsum("hpwm,pme->hpwe", keys, state)
    for n in range(len(plan.boxes)):
        group, step = len(plan.near) + n, _step(alpha, plan, n)
        pulls = torch.zeros_like(queries)
        plan.read(n, keys, values, states, Reader(y, pulls, flip=True))
        grad_q.addcmul_(step, pulls)
        by_box = (queries * pulls).sum(-1)
        grad_weights[..., group] += by_box
        grad_weights[..., group + 1] -= by_box
        scaled = step * queries
        scaled_states = plan.states(scaled, y) if upright else None
        readers = Reader(values, grad_k, flip=True), Reader(keys, grad_v)
        plan.read(n, scaled, y, scaled_states, *readers)
    return grads


def _add_near_gradients(
    totals: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    y: Tensor,
    plan: Plan,
) -> None:
    """Adds the window's part of the gradients for q, k, v' and the weights."""
    grad_q, grad_k, grad_v, grad_weights = totals
    near_weights, near, heads = _near_weights(weights, plan), len(plan.near), q.shape[3]
    of_keys: tuple[Tensor, ...] = ()
    for strip, groups, (keys, values) in _window(plan, k, v):
        of_keys = of_keys or tuple(torch.zeros_like(strip.pad_keys(x)) for x in (k, v))
        queries, pulled = strip.query_tiles(q), strip.query_tiles(y)
        similarity, pull = torch.bmm(queries, keys.mT), torch.bmm(pulled, values.mT)
        by_group = tiled._sum_by_group(similarity * pull, groups, near)
        by_group = F.pad(by_group, (0, 1))
        by_group[..., -1] = -by_group.sum(-1)
        grad_weights[:, strip.rows, ..., : near + 1] += strip.untile_queries(by_group, heads)
        pair_weights = tiled._pair_weights(strip.query_tiles(near_weights), groups)
        similarity *= pair_weights
        pull *= pair_weights
        grad_q[:, strip.rows] += strip.untile_queries(torch.bmm(pull, keys), heads)
        strip.add_key_tiles(of_keys[0], torch.bmm(pull.mT, queries))
        strip.add_key_tiles(of_keys[1], torch.bmm(similarity.mT, pulled))
    for total, padded in zip((grad_k, grad_v), of_keys, strict=False):
        inside = padded[:, :, strip.padding : strip.padding + total.shape[2]]
        total += inside.unflatten(0, (-1, heads)).permute(0, 2, 3, 1, 4)


def _window(plan: Plan, k: Tensor, v: Tensor) -> Iterator[tuple[tiled.Strip, Tensor, list[Tensor]]]:
    """Strips of queries, each with its map of groups and the tiles of keys and values it meets."""
    if not plan.near:
        return
    B, H, W, N, _ = k.shape
    pairs = tiled.PAIRS_ON_CPU if k.device.type == "cpu" else tiled.PAIRS_ELSEWHERE
    strip_list = list(tiled.strips(H, W, plan.near[-1], pairs // (B * N)))
    padded = [strip_list[0].pad_keys(x) for x in (k, v)]
    for strip, groups in tiled._with_groups(strip_list, Partition(plan.near), k.device):
        yield strip, groups, [strip.key_tiles(x) for x in padded]


def _near_weights(weights: Tensor, plan: Plan) -> Tensor:
    """Weights of the window's groups relative to the group around them, which then weighs 0."""
    near = len(plan.near)
    return weights[..., : near + 1] - weights[..., near : near + 1]


def _step(alpha: Tensor, plan: Plan, n: int) -> Tensor:
    """By how much the weight falls where box n ends."""
    inside = len(plan.near) + n
    return (alpha[..., inside] - alpha[..., inside + 1]).unsqueeze(-1)


def _rows_first(x: Tensor, tile: int) -> Tensor:
    """(B, H, W, N, C) → (H, B·N, W, C), H and W filled up with zeros to whole tiles."""
    _, H, W, _, _ = x.shape
    x = x.to(accumulation_dtype(x)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    if H % tile or W % tile:
        x = F.pad(x, (0, 0, 0, -W % tile, 0, 0, 0, -H % tile))
    return x.contiguous()


def _heads_last(x: Tensor, B: int, H: int, W: int, N: int) -> Tensor:
    """The inverse, on a grid of H×W."""
    return x[:H, :, :W].unflatten(1, (B, N)).permute(1, 0, 3, 2, 4)


def _parts(q: Tensor, v: Tensor, plan: Plan) -> Iterator[tuple[slice, ...]]:
    """Pieces of the batch and heads whose states stay within what is large at a time."""
    rows, columns = (-(-size // plan.tile) for size in v.shape[1:3])
    states = max(rows, columns) * max(plan.tile, min(rows, columns))
    of_head = states * q.shape[-1] * (v.shape[-1] + 1)
    budget = NUMBERS_ON_CPU if v.device.type == "cpu" else NUMBERS_ELSEWHERE
    third = of_head * v.shape[0] * v.shape[3] // 3  # its copies and results are small beside all
    return parts(v, of_head, min(budget, third))
