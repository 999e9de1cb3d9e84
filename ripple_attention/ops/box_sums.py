"""Sums over wide boxes around every token, by states that the queries of a tile share.

The state of some keys is Σ_j a_j b_jᵀ, an M×E matrix. A query x reads xᵀ(Σ a_j b_jᵀ) from it, or,
flipped, (Σ a_j b_jᵀ)x. Of a box of radius kT − 1 + s around a query in a tile of T×T tokens

- the tiles nearer than k are whole, for all queries of the tile: the core. With the rows above and
  below it that the box reaches, it is one state for the T queries of a row (`_add_rows`);
- the columns left and right of the core are the same, seen from the side: the grid transposed;
- the four corners, where both rows and columns are cut, are met as pairs (`_add_corners`).

All sums are sums of what they hold: no prefix sums, no differences. Tensors are rows first,
(H, P, W, C) with P images and heads, and H and W whole tiles.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Reader(NamedTuple):
    """Who reads the boxes, and where what is read is added.

    With `flip` the parts of a and b are swapped: x (H, P, W, E) reads (H, P, W, M).
    """

    x: Tensor
    total: Tensor
    flip: bool = False

    def add(self, rows: slice, state: Tensor) -> None:
        """Has runs of queries in a row, or whole tiles of them, read a state each."""
        runs = (state.shape[0], -1)
        x, total = (x[rows].view(*runs, x.shape[-1]) for x in (self.x, self.total))
        total.baddbmm_(x, state.mT if self.flip else state)


def add_box_sums(
    a: Tensor,
    b: Tensor,
    readers: Sequence[Reader],
    radius: int,
    tile: int,
    states: Tensor | None,
) -> None:
    """Adds to every reader's total what it reads of its box, in two calls that add up.

    Args:
        a, b: (H, P, W, M) and (H, P, W, E), zero for padded keys.
        readers: One at least.
        radius: At least tile − 1.
        tile: T; divides H and W.
        states: Of a and b (`tile_states`). In the other call, with the grid transposed, None: it
            adds the columns left and right of the core.
    """
    if states is None:
        _add_rows(a, b, readers, radius, tile, None)
    else:
        core = _band(states, 0, (radius + 1) // tile - 1)
        _add_rows(a, b, readers, radius, tile, core)
        _add_corners(a, b, readers, radius, tile)


def add_tile_box_sums(readers: Sequence[Reader], radius: int, tile: int, states: Tensor) -> None:
    """The same of boxes of whole tiles: those at most `radius` tiles from the query's."""
    boxes = _band(_band(states, 0, radius), 2, radius).flatten(0, 2)
    for x, total, flip in readers:
        read = torch.bmm(to_tiles(x, tile), boxes.mT if flip else boxes)
        total.add_(from_tiles(read, total.shape, tile))


def tile_states(a: Tensor, b: Tensor, tile: int) -> Tensor:
    """The state of every tile: (H, P, W, M), (H, P, W, E) → (rows, P, columns, M, E) of tiles."""
    H, P, W, _ = a.shape
    return torch.bmm(to_tiles(a, tile).mT, to_tiles(b, tile)).view(
        H // tile, P, W // tile, a.shape[-1], b.shape[-1]
    )


def to_tiles(x: Tensor, tile: int) -> Tensor:
    """(H, P, W, C) → (tile rows·P·tile columns, T·T, C)."""
    x = x.unflatten(2, (-1, tile)).unflatten(0, (-1, tile))
    return x.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1, 2)


def from_tiles(x: Tensor, shape: Sequence[int], tile: int) -> Tensor:
    """The inverse of `to_tiles`, for a total of this shape."""
    H, P, W, _ = shape
    x = x.view(H // tile, P, W // tile, tile, tile, -1)
    return x.permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 1)


def _band(x: Tensor, dim: int, radius: int) -> Tensor:
    """Sums over the neighbours within `radius` along a dimension."""
    size, outer = x.shape[dim], x.shape[:dim]
    return (band_matrix(size, radius, x) @ x.reshape(*outer, size, -1)).view(x.shape)


def band_matrix(size: int, radius: int, like: Tensor) -> Tensor:
    """One where column and row differ by at most `radius`, else zero: (size, size)."""
    index = torch.arange(size, device=like.device)
    return ((index[:, None] - index).abs() <= radius).to(like.dtype)


def _add_rows(
    a: Tensor, b: Tensor, readers: Sequence[Reader], radius: int, tile: int, core: Tensor | None
) -> None:
    """Has queries read the tile columns that lie whole in their box: all its rows, or, without
    `core` (tile rows, P, tile columns, M, E), those above and below the core alone.
    """
    H, P, W, M = a.shape
    whole, more = divmod(radius + 1, tile)
    columns, E = W // tile, b.shape[-1]
    states = a.new_empty(tile, P * columns, M, E)  # of a row of tiles, for each row of queries
    below, summed = torch.empty_like(states[0]), torch.empty_like(states)
    band = band_matrix(columns, whole - 1, a)
    of_row = states.unbind(0)
    rows_a, rows_b = (x.view(H, P * columns, tile, -1) for x in (a, b))
    rows = list(zip(rows_a.mT.unbind(0), rows_b.unbind(0), strict=True))

    def add_row(state: Tensor, row: int, out: Tensor) -> None:
        if 0 <= row < H:
            torch.baddbmm(state, *rows[row], out=out)
        elif out is not state:
            out.copy_(state)

    for top in range(0, H, tile):
        above, under = top - (whole - 1) * tile, top + whole * tile  # where the core ends
        if above <= 0 and under >= H and core is None:
            continue
        if core is None:
            of_row[-1].zero_()
        else:
            of_row[-1].copy_(core[top // tile].flatten(0, 1))
        for row in range(above - more, above):
            add_row(of_row[-1], row, of_row[-1])
        for i in range(tile - 2, -1, -1):
            add_row(of_row[i + 1], top + i - radius, of_row[i])
        if under < H:
            below.zero_()
            for row in range(under, under + more):
                add_row(below, row, below)
            of_row[0].add_(below)
            for i in range(1, tile):
                add_row(below, under + more + i - 1, below)
                of_row[i].add_(below)
        flat = (tile * P, columns, M * E)
        torch.matmul(band, states.view(flat), out=summed.view(flat))
        for reader in readers:
            reader.add(slice(top, top + tile), summed.flatten(0, 1))


def _add_corners(a: Tensor, b: Tensor, readers: Sequence[Reader], radius: int, tile: int) -> None:
    """Has queries meet the keys in the corners of their box, where it cuts rows and columns.

    Half the rows of a tile's queries at a time meet those keys that one of them sees.
    """
    H, P, W, _ = a.shape
    whole, more = divmod(radius + 1, tile)
    size, across = tile - 1 + more, W // tile  # a corner has at most size × size keys
    height = tile // 2
    index = torch.arange(max(H, P, W, size), device=a.device)
    lines = (index[:H, None] * P + index[:P]).mT * W  # (P, H), where rows begin
    all_keys, all_values = a.flatten(0, 2), b.flatten(0, 2)
    for top in range(0, H, tile):
        ends = (top - radius, top + whole * tile)
        runs = [range(max(0, end), max(0, min(end + size, H))) for end in ends]
        cut = [row for run in runs for row in run]
        if not cut:
            continue
        rows = torch.cat([index[run.start : run.stop] for run in runs])
        bands = []  # of a tile's rows: which rows of keys they meet, and which of them each sees
        for first in range(top, top + tile, height):
            last = first + height
            met = slice(bisect_left(cut, first - radius), bisect_left(cut, last + radius))
            seen = (index[first:last, None] - rows[met]).abs() <= radius
            bands.append((met, seen[:, None, :, None]))
        here = slice(top, top + tile)
        queries = [_to_bands(x[here], height, tile) for x, _, _ in readers]
        sums = [_to_bands(total[here], height, tile).zero_() for _, total, _ in readers]
        for first, last, start in ((whole, across, -radius), (0, across - whole, whole * tile)):
            if first >= last:
                continue
            columns = index[first:last, None] * tile + start + index[:size]  # (tiles, size)
            cells = lines[:, rows, None] + columns.clamp(0, W - 1)[:, None, None]
            keys, values = (x.index_select(0, cells.flatten()) for x in (all_keys, all_values))
            if more > 1:  # a corner may leave the grid at its side
                outside = (columns < 0) | (columns >= W)
                outside = outside[:, None, None].expand(cells.shape).flatten()[:, None]
                keys, values = keys.masked_fill_(outside, 0), values.masked_fill_(outside, 0)
            keys, values = (x.view(-1, len(rows) * size, x.shape[-1]) for x in (keys, values))
            column_seen = (index[:tile, None] - start - index[:size]).abs() <= radius
            tiles = slice(first * P, last * P)
            for band, (met, row_seen) in enumerate(bands):
                seen = (row_seen & column_seen[:, None]).flatten(2, 3).flatten(0, 1).to(a.dtype)
                near = slice(met.start * size, met.stop * size)
                for reader, x, total in zip(readers, queries, sums, strict=True):
                    left, right = (values, keys) if reader.flip else (keys, values)
                    pairs = torch.bmm(x[band, tiles], left[:, near].mT).mul_(seen)
                    total[band, tiles].baddbmm_(pairs, right[:, near])
        for (_, total, _), part in zip(readers, sums, strict=True):
            part = part.view(tile // height, across, P, height, tile, -1).permute(0, 3, 2, 1, 4, 5)
            total[here].add_(part.flatten(0, 1).flatten(2, 3))


def _to_bands(x: Tensor, height: int, tile: int) -> Tensor:
    """(T, P, W, C) → (bands, tiles·P, height·T, C), a new tensor: a few rows of each tile."""
    x = x.unflatten(2, (-1, tile)).unflatten(0, (-1, height)).permute(0, 3, 2, 1, 4, 5)
    return x.clone(memory_format=torch.contiguous_format).flatten(1, 2).flatten(2, 3)
