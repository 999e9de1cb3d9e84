"""Near window by tiles, far part as linear attention: the fast algorithm, in PyTorch operations.

A query's weights are its weight for the rest, spread over the whole grid, plus a correction inside
the last box (docs/algorithm.md, "Near and far"). The far part needs one M×E matrix for the image.
The near part takes the queries in strips of rows, cut into tiles of columns; each tile meets its
halo of keys in two small matrix products. Where the halo is the whole grid, there is no far part.
No M×E state per token, no summed-area table, and nothing kept for the backward pass but the inputs,
the output and the denominator.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ripple_attention.ops.common import (
    accumulation_dtype,
    flush_cancellation,
    heads_first,
    parts,
    safe_divide,
)
from ripple_attention.partition import Partition

# Small tiles waste little of their halo, large ones copy fewer keys; 8 columns need no padding on
# most grids. A side of at most twice a tile and the reach is not worth cutting.
TILE_ROWS = 6
TILE_COLUMNS = 8

# Query-key pairs in flight: about one L2 cache on a CPU, enough to fill the machine elsewhere.
PAIRS_ON_CPU = 2**21
PAIRS_ELSEWHERE = 2**26

FEW_GROUPS = 16


@dataclass(frozen=True)
class Strip:
    """A few rows of queries, the rows of keys in their reach, and the tiling of their columns.

    With one tile, `tile` and `halo` are the whole width; with more, each tile's halo starts `reach`
    columns to its left, and columns outside the grid are zero.
    """

    rows: slice
    key_rows: slice
    width: int
    tiles: int
    tile: int
    halo: int
    reach: int

    @property
    def padded_width(self) -> int:
        """Columns from the first halo's left end to the last one's right end."""
        return (self.tiles - 1) * self.tile + self.halo

    @property
    def padding(self) -> int:
        """Columns of the first halo that lie left of the grid."""
        return self.reach if self.tiles > 1 else 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the group map depends on: query rows, key rows, key rows above the first query."""
        above = self.rows.start - self.key_rows.start
        return self.rows.stop - self.rows.start, self.key_rows.stop - self.key_rows.start, above

    @property
    def pairs(self) -> int:
        """Query-key pairs that the strip computes for each head."""
        rows, key_rows, _ = self.shape
        return self.tiles * self.tile * rows * self.halo * key_rows

    def query_tiles(self, x: Tensor) -> Tensor:
        """(B, H, W, N, C) → (B·N·tiles, rows·tile, C)."""
        x = _pad_columns(heads_first(x[:, self.rows]), 0, self.tiles * self.tile - self.width)
        x = x.unflatten(3, (self.tiles, self.tile)).transpose(2, 3)  # (B, N, tiles, rows, tile, C)
        return x.flatten(3, 4).flatten(0, 2)

    def pad_keys(self, x: Tensor) -> Tensor:
        """(B, H, W, N, C) → (B·N, H, padded width, C), zero outside the grid."""
        right = self.padded_width - self.width - self.padding
        return _pad_columns(heads_first(x), self.padding, right).flatten(0, 1)

    def key_tiles(self, x: Tensor) -> Tensor:
        """(B·N, H, padded width, C) → (B·N·tiles, key rows·halo, C)."""
        x = x[:, self.key_rows].unfold(2, self.halo, self.tile)  # (B·N, key rows, tiles, C, halo)
        return x.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)

    def untile_queries(self, x: Tensor, heads: int) -> Tensor:
        """(B·N·tiles, rows·tile, C) → (B, rows, W, N, C)."""
        x = x.unflatten(1, (-1, self.tile)).unflatten(0, (-1, heads, self.tiles))
        x = x.permute(0, 3, 2, 4, 1, 5).flatten(2, 3)  # (B, rows, tiles·tile, N, C)
        return x[:, :, : self.width]

    def add_key_tiles(self, total: Tensor, x: Tensor) -> None:
        """Adds (B·N·tiles, key rows·halo, C) to the cells of (B·N, H, padded width, C) under it."""
        x = x.unflatten(1, (-1, self.halo)).unflatten(0, (-1, self.tiles)).transpose(1, 2)
        for start in range(0, self.halo, self.tile):  # pieces as wide as a tile do not overlap
            piece = x[:, :, :, start : start + self.tile]  # (B·N, key rows, tiles, ≤ tile, C)
            cells = total[:, self.key_rows, start:].unfold(2, piece.shape[3], self.tile)
            cells[:, :, : self.tiles].transpose(-1, -2).add_(piece)

    def groups(self, partition: Partition, device: torch.device) -> Tensor:
        """The group of each key of the halo for each query of a tile: (rows·tile, rows·halo)."""
        num_rows, num_key_rows, above = self.shape
        rows = torch.arange(num_rows, device=device)
        key_rows = torch.arange(num_key_rows, device=device) - above
        columns = torch.arange(self.tile, device=device)
        key_columns = torch.arange(self.halo, device=device) - self.padding
        down = (rows[:, None] - key_rows).abs()[:, None, :, None]
        across = (columns[:, None] - key_columns).abs()[None, :, None, :]
        distance = torch.maximum(down, across).flatten(2, 3).flatten(0, 1)
        return partition.group_of_distance(num_key_rows + self.halo, device)[distance]


def strips(height: int, width: int, reach: int, max_pairs: int = PAIRS_ON_CPU) -> Iterator[Strip]:
    """Cuts a grid into strips, each of at most `max_pairs` pairs a head where rows can be split."""
    tile = _uncut(width, TILE_COLUMNS, reach)
    halo = width if tile == width else tile + 2 * reach
    tiles = -(-width // tile)
    rows = _uncut(height, TILE_ROWS, reach)
    pairs_per_row = tiles * tile * halo * min(height, rows + 2 * reach)
    rows = max(1, min(rows, max_pairs // pairs_per_row))
    for start in range(0, height, rows):
        stop = min(start + rows, height)
        keys = slice(max(0, start - reach), min(height, stop + reach))
        yield Strip(slice(start, stop), keys, width, tiles, tile, halo, reach)


def halo_size(height: int, width: int, reach: int) -> int:
    """The number of keys that a query meets, but for tiles that are cut short at the border."""
    rows = min(height, _uncut(height, TILE_ROWS, reach) + 2 * reach)
    return rows * min(width, _uncut(width, TILE_COLUMNS, reach) + 2 * reach)


def _uncut(size: int, tile: int, reach: int) -> int:
    return size if size <= 2 * (tile + reach) else tile


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], eps: float
) -> tuple[Tensor, Tensor]:
    """Ripple attention by tiles. Arguments as in `ripple_naive`.

    Returns:
        The output (B, H, W, N, E) in the type of v, and the denominators, eps included,
        (B, H, W, N) in float32 or better.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    denominator = v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
    strip_list, budget = _plan(v, radii)
    for part in parts(v, max(strip.pairs for strip in strip_list), budget):
        queries, keys, values, weights = (x[part] for x in (q, k, v, spatial_weights))
        pieces = _attend(queries, keys, values, weights, Partition(radii), strip_list, eps)
        for strip, *results in pieces:
            out[part][:, strip.rows], denominator[part][:, strip.rows] = results
    return out, denominator


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    partition: Partition,
    strip_list: list[Strip],
    eps: float,
) -> Iterator[tuple[Strip, Tensor, Tensor]]:
    """Output and denominator + eps of a few heads, strip by strip, in the type of the sums."""
    heads = v.shape[3]
    padded_k, padded_v = strip_list[0].pad_keys(k), strip_list[0].pad_keys(v)
    state = None if _sees_all(strip_list, v) else _far_state(padded_k, padded_v)  # (B·N, M, E+1)
    for strip, groups in _with_groups(strip_list, partition, v.device):
        queries = strip.query_tiles(q)
        weights = strip.query_tiles(spatial_weights)  # (B·N·tiles, rows·tile, G)
        rest = weights[..., -1:]
        pairs = torch.bmm(queries, strip.key_tiles(padded_k).mT)
        pairs *= _pair_weights(weights if state is None else weights - rest, groups)
        numerator = torch.bmm(pairs, strip.key_tiles(padded_v))
        near = pairs.sum(-1, keepdim=True)
        denominator = near + eps
        if state is not None:
            far = _by_tile(_by_head(rest * queries, strip) @ state, strip)
            numerator += far[..., :-1]
            magnitude = near.abs() + far[..., -1:].abs()
            denominator = flush_cancellation(denominator + far[..., -1:], magnitude)
        out = strip.untile_queries(safe_divide(numerator, denominator), heads)
        yield strip, out, strip.untile_queries(denominator, heads).squeeze(-1)


def tiled_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    out: Tensor,
    denominator: Tensor,
    radii: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `tiled_forward` for q, k, v and the weights, each in the type of its input."""
    given = (grad, q, k, v, spatial_weights, out, denominator)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[1:5]]
    strip_list, budget = _plan(v, radii)
    for part in parts(v, 2 * max(strip.pairs for strip in strip_list), budget):
        pieces = [x[part] for x in given]
        _write_gradients([x[part] for x in grads], pieces, Partition(radii), strip_list)
    return grads[0], grads[1], grads[2], grads[3]


def _write_gradients(
    grads: list[Tensor], given: list[Tensor], partition: Partition, strip_list: list[Strip]
) -> None:
    """Writes the gradients of a few heads into `grads`: for q, k, v and the weights.

    With y_i = ∂o_i/den_i and c_i = −y_i·o_i, the pair (i, j) adds the product of its weight w,
    similarity s = φq_i·φk_j and pull t = y_i·v_j + c_i to the loss: each gradient leaves one out.
    """
    grad, q, k, v, spatial_weights, out, denominator = given
    B, _, W, N, _ = v.shape
    sees_all = _sees_all(strip_list, v)
    padded_k, padded_v = strip_list[0].pad_keys(k), strip_list[0].pad_keys(v)
    state = _far_state(padded_k, padded_v)  # (B·N, M, E+1)
    far_grad = torch.zeros_like(state)
    grad_k, grad_v = (x.new_zeros(x.shape) for x in (padded_k, padded_v))
    inverse = safe_divide(1, denominator).unsqueeze(-1)
    all_y = grad * inverse
    all_c = -(all_y * out).sum(-1, keepdim=True)
    for strip, groups in _with_groups(strip_list, partition, v.device):
        queries = strip.query_tiles(q)
        keys, values = strip.key_tiles(padded_k), strip.key_tiles(padded_v)
        weights = strip.query_tiles(spatial_weights)
        y, c = strip.query_tiles(all_y), strip.query_tiles(all_c)

        rest = weights[..., -1:]
        near = _pair_weights(weights if sees_all else weights - rest, groups)
        similarity = torch.bmm(queries, keys.mT)  # (B·N·tiles, rows·tile, key rows·halo)
        pull = torch.bmm(y, values.mT).add_(c)
        near_groups = partition.num_groups - (0 if sees_all else 1)
        by_group = _sum_by_group(similarity * pull, groups, near_groups)
        similarity *= near
        pull *= near
        strip.add_key_tiles(grad_k, torch.bmm(pull.mT, queries))
        strip.add_key_tiles(grad_v, torch.bmm(similarity.mT, y))

        grad_q = torch.bmm(pull, keys)
        if not sees_all:
            y_and_c = _by_head(torch.cat([y, c], -1), strip)  # (B·N, tiles·rows·tile, E+1)
            far_pull = _by_tile(y_and_c @ state.mT, strip)  # (B·N·tiles, rows·tile, M)
            far_grad.baddbmm_(_by_head(rest * queries, strip).mT, y_and_c)
            grad_q.addcmul_(rest, far_pull)
            grad_rest = (queries * far_pull).sum(-1) - by_group.sum(-1)
            by_group = torch.cat([by_group, grad_rest.unsqueeze(-1)], -1)
        grads[0][:, strip.rows] = strip.untile_queries(grad_q, N)
        grads[3][:, strip.rows] = strip.untile_queries(by_group, N)

    if not sees_all:
        grad_k.flatten(1, 2).baddbmm_(padded_v.flatten(1, 2), far_grad[..., :-1].mT)
        grad_k += far_grad[..., -1:].mT.unsqueeze(1)
        grad_v.flatten(1, 2).baddbmm_(padded_k.flatten(1, 2), far_grad[..., :-1])
    columns = slice(strip_list[0].padding, strip_list[0].padding + W)
    for total, padded in ((grads[1], grad_k), (grads[2], grad_v)):
        total.copy_(padded[:, :, columns].unflatten(0, (B, N)).permute(0, 2, 3, 1, 4))


def _plan(v: Tensor, radii: list[int]) -> tuple[list[Strip], int]:
    """The strips of the grid, and how many pairs may be in flight on this device."""
    budget = PAIRS_ON_CPU if v.device.type == "cpu" else PAIRS_ELSEWHERE
    return list(strips(v.shape[1], v.shape[2], radii[-1], budget)), budget


def _with_groups(
    strip_list: list[Strip], partition: Partition, device: torch.device
) -> Iterator[tuple[Strip, Tensor]]:
    """Each strip with its group map, which neighbours of the same shape share."""
    shape, groups = None, torch.empty(0)
    for strip in strip_list:
        if strip.shape != shape:
            shape, groups = strip.shape, strip.groups(partition, device)
        yield strip, groups


def _far_state(k: Tensor, v: Tensor) -> Tensor:
    """Σ φ(k)[v, 1]ᵀ over the image: (B·N, H, W, M) and (B·N, H, W, E) → (B·N, M, E+1)."""
    keys, values = k.flatten(1, 2), v.flatten(1, 2)
    return torch.cat([keys.mT @ values, keys.sum(1).unsqueeze(-1)], -1)


def _sees_all(strip_list: list[Strip], v: Tensor) -> bool:
    """Whether every tile meets every key: then all groups are near and there is no far part."""
    return strip_list[0].tiles == 1 and all(strip.shape[1] == v.shape[1] for strip in strip_list)


def _pair_weights(weights: Tensor, groups: Tensor) -> Tensor:
    """The weight of each pair of a tile: (batch, queries, G) → (batch, queries, keys)."""
    return weights.gather(-1, groups.expand(weights.shape[0], -1, -1))


def _sum_by_group(pairs: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """(batch, queries, keys) → (batch, queries, G): for few groups, by a one-hot matrix."""
    if num_groups > FEW_GROUPS:
        sums = pairs.new_zeros(*pairs.shape[:2], num_groups + 1)  # and one for all that is beyond
        return sums.scatter_add_(-1, groups.expand_as(pairs), pairs)[..., :num_groups]
    members = groups.unsqueeze(1) == torch.arange(num_groups, device=groups.device).unsqueeze(-1)
    sums = torch.bmm(members.to(pairs.dtype), pairs.permute(1, 2, 0))  # (queries, groups, batch)
    return sums.permute(2, 0, 1)


def _by_head(x: Tensor, strip: Strip) -> Tensor:
    return x.unflatten(0, (-1, strip.tiles)).flatten(1, 2)  # (B·N, tiles·rows·tile, C)


def _by_tile(x: Tensor, strip: Strip) -> Tensor:
    return x.unflatten(1, (strip.tiles, -1)).flatten(0, 1)  # (B·N·tiles, rows·tile, C)


def _pad_columns(x: Tensor, left: int, right: int) -> Tensor:
    return F.pad(x, (0, 0, left, right)) if left or right else x
