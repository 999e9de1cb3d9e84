"""What `torch.export` traces: the near window and the far sum, for any batch, height and width.

The algorithm is that of `ops/tiled.py`. A traced graph keeps no loop and no branch on a size, so
here sizes enter only into index tensors made of `arange`, and plain operations do the rest: the
graph runs without this package.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ripple_attention.ops.common import flush_cancellation, heads_first, safe_divide
from ripple_attention.partition import Partition

TILE = 8  # rows and columns of a tile of queries

# A partition that reaches farther takes the whole grid as one tile. This depends on the partition
# alone: one graph serves every grid.
WIDEST_HALO = 16

NOWHERE = 2**30  # a row or column that no grid has


def ripple_export(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    bounds: list[int],
    eps: float,
    numerator: Tensor | None = None,
    total: Tensor | None = None,
) -> Tensor:
    """Ripple attention for `torch.export`. Arguments as in `ripple_naive`.

    Memory grows with L·(TILE + 2·reach)², or with L² if the reach is more than `WIDEST_HALO` or the
    partition has coarse rings. Weights of rings without a key may be anything. With `numerator`
    and `total` the mean has one share more, as in `library.register_shared`.
    """
    _, H, W, _, _ = v.shape
    partition = Partition.from_bounds(bounds)
    tiles = tile_grid(H, W, partition, v.device)

    queries, keys, values, weights = (by_head(x) for x in (q, k, v, spatial_weights))
    values = torch.cat([values, torch.ones_like(values[..., :1])], -1)  # (B·N, L, E+1)
    rest = weights[..., -1:].masked_fill(_rest_is_empty(keys, H, W, partition.reach), 0)
    if partition.tile:
        rest = torch.zeros_like(rest)  # every pair is met, those of the rest too
    far = torch.bmm(rest * queries, torch.bmm(keys.mT, values))  # (B·N, L, E+1)

    tile_queries = gather(queries, tiles.queries)  # (B·N·tiles, tile, M)
    tile_weights = gather(weights - rest, tiles.queries)
    halo_keys = gather(keys, tiles.keys, tiles.inside)  # (B·N·tiles, halo, M), 0 outside the grid
    halo_values = gather(values, tiles.keys, tiles.inside)
    pairs = torch.bmm(tile_queries, halo_keys.mT) * pair_weights(tile_weights, tiles.groups)
    near = tiles.untile(torch.bmm(pairs, halo_values))  # (B·N, L, E+1)

    near_sum, far_sum = near[..., -1:], far[..., -1:]
    denominator = flush_cancellation(near_sum + far_sum + eps, near_sum.abs() + far_sum.abs())
    sums = near[..., :-1] + far[..., :-1]
    if numerator is not None and total is not None:
        sums = sums.masked_fill(denominator == 0, 0) + by_head(numerator)
        denominator = denominator + by_head(total.unsqueeze(-1))
    return to_grid(safe_divide(sums, denominator), v).to(v.dtype)


class Tiles(NamedTuple):
    """How a grid is cut into tiles of queries, each with its halo of keys."""

    queries: Tensor  # (tiles, tile): the cell of each query
    keys: Tensor  # (tiles, halo): the cell of each key, the nearest one for those off the grid
    inside: Tensor  # (tiles, halo): which lie on the grid
    groups: Tensor  # (tile, halo): the group of each pair, the same for all tiles
    place: Tensor  # (L,): where the tiles hold each cell

    def untile(self, x: Tensor) -> Tensor:
        """(B·N·tiles, tile, C) → (B·N, L, C)."""
        x = x.unflatten(0, (-1, self.queries.shape[0])).flatten(1, 2)
        return x.index_select(1, self.place)


def tile_grid(H: int, W: int, partition: Partition, device: torch.device) -> Tiles:
    """Tiles of TILE × TILE queries; or, for a wide partition, the grid as one tile."""
    if partition.reach <= WIDEST_HALO and not partition.tile:
        margin, tile_rows, tile_columns = partition.reach, TILE, TILE
        across = (W + TILE - 1) // TILE
        # One tile more than needed: a size that may be 1 would be a constant of the graph.
        tiles = (H + TILE - 1) // TILE * across + 1
    else:
        margin, tile_rows, tile_columns, across, tiles = 0, H, W, 1, 1
    index = torch.arange(tiles, device=device)[:, None]
    tile_row, tile_column = _divide(index, across)
    top, left = tile_row * tile_rows, tile_column * tile_columns  # (tiles, 1)
    rows, columns = (torch.arange(size, device=device) for size in (tile_rows, tile_columns))
    queries, _ = _cells(top + rows, left + columns, H, W)
    key_rows = torch.arange(-margin, tile_rows + margin, device=device)
    key_columns = torch.arange(-margin, tile_columns + margin, device=device)
    keys, inside = _cells(top + key_rows, left + key_columns, H, W)

    down = (rows[:, None] - key_rows).abs()[:, None, :, None]
    aside = (columns[:, None] - key_columns).abs()[None, :, None, :]
    distance = torch.maximum(down, aside).flatten(2, 3).flatten(0, 1)  # (tile, halo)
    groups = partition.group_of_distance(partition.reach + 2, device)
    groups = groups[distance.clamp(max=partition.reach + 1)]
    if partition.tile:
        in_tiles = (rows // partition.tile, columns // partition.tile)
        below, beside = ((x[:, None] - x).abs() for x in in_tiles)
        distance = torch.maximum(below[:, None, :, None], beside[None, :, None, :])
        distance = distance.flatten(2, 3).flatten(0, 1)
        for radius in partition.tile_radii:
            groups = groups + (distance > radius).long()

    tile_row, row = _divide(torch.arange(H, device=device)[:, None], tile_rows)
    tile_column, column = _divide(torch.arange(W, device=device), tile_columns)
    place = (tile_row * across + tile_column) * (tile_rows * tile_columns)
    place = place + row * tile_columns + column  # (H, W)
    return Tiles(queries, keys, inside, groups, place.flatten())


def to_grid(x: Tensor, like: Tensor) -> Tensor:
    """(B·N, L, C) → (B, H, W, N, C), with the sizes of `like`."""
    B, H, W, N, _ = like.shape
    return x.unflatten(1, (H, W)).unflatten(0, (B, N)).permute(0, 2, 3, 1, 4)


def _rest_is_empty(keys: Tensor, H: int, W: int, reach: int) -> Tensor:
    """For which queries the last box holds all keys but those that are 0: bool (B·N, L, 1).

    The weight of a rest without keys changes nothing in exact arithmetic; without it, near and far
    need not cancel.
    """
    live = (keys != 0).any(-1).unflatten(1, (H, W))
    within = []
    for size, occupied in ((H, live.any(2)), (W, live.any(1))):
        index = torch.arange(size, device=keys.device)
        first = torch.where(occupied, index, NOWHERE).amin(1, keepdim=True)
        last = torch.where(occupied, index, -NOWHERE).amax(1, keepdim=True)
        within.append((index - first <= reach) & (last - index <= reach))  # (B·N, size)
    return (within[0][:, :, None] & within[1][:, None, :]).flatten(1).unsqueeze(-1)


def _divide(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder. (ONNX export has no `%` of a tensor and a symbol.)"""
    quotient = index // size
    return quotient, index - quotient * size


def _cells(rows: Tensor, columns: Tensor, H: int, W: int) -> tuple[Tensor, Tensor]:
    """Rows (tiles, a) and columns (tiles, b) → cells in raster order (tiles, a·b), and which of
    them lie on the grid; the others stand for the nearest cell that does.
    """
    inside = ((rows >= 0) & (rows < H))[:, :, None] & ((columns >= 0) & (columns < W))[:, None, :]
    cells = rows.clamp(0, H - 1)[:, :, None] * W + columns.clamp(0, W - 1)[:, None, :]
    return cells.flatten(1), inside.flatten(1)


def gather(x: Tensor, cells: Tensor, inside: Tensor | None = None) -> Tensor:
    """(B·N, L, C) → (B·N·tiles, cells, C), and 0 for cells that are not inside."""
    x = x.index_select(1, cells.flatten()).unflatten(1, cells.shape)
    if inside is not None:
        x = x.masked_fill(~inside.unsqueeze(-1), 0)
    return x.flatten(0, 1)


def pair_weights(weights: Tensor, groups: Tensor) -> Tensor:
    """(batch, tile, G), (tile, halo) → (batch, tile, halo). ONNX would expand `gather`'s index."""
    row, G = torch.arange(weights.shape[1], device=groups.device), weights.shape[2]
    index = row[:, None] * G + groups
    return weights.flatten(1).index_select(1, index.flatten()).unflatten(1, groups.shape)


def by_head(x: Tensor) -> Tensor:
    return heads_first(x).flatten(2, 3).flatten(0, 1)  # (B·N, L, C)
