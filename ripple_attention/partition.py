"""Partitions: which tokens around a query share a spatial weight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from ripple_attention.checks import check_count, check_pair, shorten

MOST_RINGS = 2**16
LARGEST_RADIUS = 2**30 - 1  # distances of cells to it fit 32 bits
MOST_COARSE_RINGS = 30  # each twice as far as the one before
MOST_GROUPS = MOST_RINGS + MOST_COARSE_RINGS + 2  # with the rest, and prefix tokens


@dataclass(frozen=True)
class Partition:
    """A split of the grid, seen from any query, into vicinal groups bounded by square boxes.

    Group 0 is the box of radius `radii[0]` around the query, group g is the box of `radii[g]`
    without the one before it, and the last group is the rest: every token outside the last box.
    Distance is Chebyshev, `max(|Δrow|, |Δcolumn|)`; boxes are clipped at the border of the grid.

    Coarse rings may follow the last box: what lies outside it is then split by the Chebyshev
    distance between the tile of the query and the tile of the key, where tiles of `tile` × `tile`
    tokens cover the grid from its first token on. The rest is every tile outside the last.

    Args:
        radii: Box radii, strictly increasing, each ≥ 0, at least one.
        tile: Rows and columns of a tile; 0 without coarse rings. More than the last of `radii`, so
            that boxes lie within the tiles around the query's.
        tile_radii: Bounds of the coarse rings in tiles, strictly increasing, each ≥ 1.

    >>> chebyshev(4).radii
    (0, 1, 2, 3)
    >>> chebyshev(4).num_groups
    5
    """

    radii: tuple[int, ...]
    tile: int
    tile_radii: tuple[int, ...]

    def __init__(self, radii: Iterable[int], tile: int = 0, tile_radii: Iterable[int] = ()):
        some = islice(radii, MOST_RINGS + 1) if isinstance(radii, Iterable) else ()
        given, radii = radii, tuple(some)
        are_whole = all(
            isinstance(radius, int) and not isinstance(radius, bool) for radius in radii
        )
        rising = are_whole and all(low < high for low, high in pairwise(radii))
        few = 0 < len(radii) <= MOST_RINGS
        if not few or not rising or radii[0] < 0 or radii[-1] > LARGEST_RADIUS:
            raise ValueError(
                f"a partition needs from one to {MOST_RINGS} radii, all of them whole, at least 0, "
                f"at most {LARGEST_RADIUS} and strictly increasing; got "
                f"radii={shorten(radii or given)}. Use chebyshev(max_distance) or "
                "logarithmic(max_distance) for the usual ones."
            )
        coarse: Any = tuple(tile_radii) if isinstance(tile_radii, Iterable) else (None,)
        plain = type(tile) is int and tile == 0 and not coarse
        if not plain and not _are_coarse_rings(radii[-1], tile, coarse):
            raise ValueError(
                "coarse rings need a tile larger than the last radius, a whole number, and at least"
                " one tile radius, all of them whole, at least 1 and strictly increasing; got "
                f"radii={shorten(radii)}, tile={shorten(tile)}, tile_radii={shorten(tile_radii)}. "
                "Use foveal(max_distance, tile, rings)."
            )
        object.__setattr__(self, "radii", radii)
        object.__setattr__(self, "tile", tile)
        object.__setattr__(self, "tile_radii", coarse)

    @property
    def num_groups(self) -> int:
        """G, one group for each box and each coarse ring, and the rest."""
        return len(self.radii) + len(self.tile_radii) + 1

    @property
    def bounds(self) -> list[int]:
        """The partition as the operators take it (radii, then −tile, then tile radii, if any)."""
        return [*self.radii, *([-self.tile] if self.tile else []), *self.tile_radii]

    @classmethod
    def from_bounds(cls, bounds: Sequence[int]) -> "Partition":
        """The inverse of `bounds`.

        >>> foveal(2, tile=4, rings=2).bounds
        [0, 1, -4, 1, 3]
        >>> Partition.from_bounds([0, 1, -4, 1, 3]) == foveal(2, tile=4, rings=2)
        True
        """
        if not isinstance(bounds, Sequence) or not all(type(x) is int for x in bounds):
            raise ValueError(
                "a partition's bounds must be a list of whole numbers, as Partition.bounds gives "
                f"them; got {shorten(bounds)}. Without coarse rings they are radii, as [0, 1, 2]."
            )
        end = next((i for i, bound in enumerate(bounds) if bound < 0), len(bounds))
        return cls(bounds[:end], -sum(bounds[end : end + 1]), bounds[end + 1 :])

    @property
    def reach(self) -> int:
        """The radius of the last box. Farther tokens are the rest, or in coarse rings."""
        return self.radii[-1]

    @property
    def extent(self) -> int:
        """The largest distance of a token that is not in the rest."""
        return self.tile * (self.tile_radii[-1] + 1) - 1 if self.tile else self.reach

    def group_of_distance(self, size: int, device: torch.device | str | None = None) -> Tensor:
        """The group of each distance 0 … size − 1: the count of boxes that do not hold it.

        Coarse rings are left out: outside the last box all is one group.

        >>> logarithmic(3).group_of_distance(6)
        tensor([0, 1, 2, 2, 3, 3])
        """
        if not isinstance(size, torch.SymInt):
            check_count("size", size, 0)
        # Made on the device: copying would wait, and could not be part of a CUDA graph.
        distance = torch.arange(size, device=device)
        if self.radii[-1] - self.radii[0] == len(self.radii) - 1:  # a box for each distance
            return (distance - self.radii[0]).clamp(0, len(self.radii))
        return sum((distance > radius).long() for radius in self.radii)  # type: ignore[return-value]

    def box_radii(self, device: torch.device | str | None = None) -> Tensor:
        """The radii as a tensor, int64 (G − 1), made on the device."""
        if self.radii[-1] - self.radii[0] == len(self.radii) - 1:
            return torch.arange(self.radii[0], self.radii[-1] + 1, device=device)
        return torch.cat([torch.full((1,), radius, device=device) for radius in self.radii])

    def groups(self, query: tuple[int, int], grid_size: tuple[int, int]) -> Tensor:
        """The group of every token, as the query at (row, column) sees it.

        Args:
            query: Row and column of the query, inside the grid.
            grid_size: (H, W).

        Returns:
            int64 tensor (H, W).

        >>> chebyshev(2).groups((0, 1), (2, 4))
        tensor([[1, 0, 1, 2],
                [1, 1, 1, 2]])
        """
        row, column = check_pair("query", query, 0)
        height, width = check_pair("grid_size", grid_size, 1)
        if not (row < height and column < width):
            raise ValueError(
                f"the query must lie inside the grid; got {query=} and {grid_size=}. "
                "Rows and columns are counted from 0."
            )
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        return self._groups(row, rows, column, columns, max(grid_size))

    def pair_groups(
        self, grid_size: tuple[int, int], device: torch.device | str | None = None
    ) -> Tensor:
        """The group of every key for every query, tokens in raster order.

        Returns:
            int64 tensor (L, L), L = H·W; symmetric.
        """
        height, width = check_pair("grid_size", grid_size, 0)
        rows = torch.arange(height, device=device).repeat_interleave(width)
        columns = torch.arange(width, device=device).repeat(height)
        return self._groups(rows[:, None], rows, columns[:, None], columns, max(grid_size))

    def _groups(
        self, row: Tensor | int, rows: Tensor, column: Tensor | int, columns: Tensor, side: int
    ) -> Tensor:
        """The groups of keys for queries, both by row and column of a grid of at most `side`."""
        distance = torch.maximum((rows - row).abs(), (columns - column).abs())
        groups = self.group_of_distance(side, rows.device)[distance]
        if self.tile:
            T = self.tile
            down, across = rows // T - row // T, columns // T - column // T
            tiles = torch.maximum(down.abs(), across.abs())
            for radius in self.tile_radii:
                groups = groups + (tiles > radius)
        return groups


def chebyshev(max_distance: int) -> Partition:
    """Rings one token thick: distances 0, 1, …, max_distance − 1, then the rest.

    Args:
        max_distance: R_max ≥ 1. It may be larger than the grid: rings outside are empty.
    """
    return Partition(range(_checked_distance(max_distance, MOST_RINGS)))


def logarithmic(max_distance: int) -> Partition:
    """Rings that double in thickness (distance 0; 1; 2–3; 4–7; …) until `max_distance` is covered.

    >>> logarithmic(5).radii
    (0, 1, 3, 7)
    """
    radii, max_distance = [0], _checked_distance(max_distance, LARGEST_RADIUS)
    while radii[-1] < max_distance:
        radii.append(2 * radii[-1] + 1)
    return Partition(radii)


def foveal(max_distance: int = 4, tile: int = 8, rings: int = 3) -> Partition:
    """Rings one token thick near by, and beyond them coarse rings that double.

    Like `chebyshev(max_distance)`, but the rest is split by the distance between the query's tile
    and the key's, of `tile` × `tile` tokens: at most 1 tile; 2–3; 4–7; …. What lies outside the
    last ring is the rest. There are max_distance + rings + 1 groups on every grid.

    Args:
        max_distance: R_max ≥ 1, at most `tile`.
        tile: Rows and columns of a tile.
        rings: How many coarse rings, at least 1: r of them reach (2^r − 1)·tile tokens.

    >>> foveal(2, tile=2, rings=1).groups((0, 0), (1, 7))
    tensor([[0, 1, 2, 2, 3, 3, 3]])
    """
    _checked_distance(max_distance, MOST_RINGS)
    check_count("rings", rings, 1, MOST_COARSE_RINGS)
    if check_count("tile", tile, 1, LARGEST_RADIUS) < max_distance:
        raise ValueError(
            f"a tile must be at least max_distance wide; got {max_distance=}, {tile=}. Take a "
            "larger tile or a smaller max_distance."
        )
    return Partition(range(max_distance), tile, [2**ring - 1 for ring in range(1, rings + 1)])


def dense(grid_size: tuple[int, int]) -> Partition:
    """A ring for every distance that occurs on the grid.

    >>> dense((3, 5)).num_groups
    5
    """
    return chebyshev(max(max(check_pair("grid_size", grid_size, 1)) - 1, 1))


def _checked_distance(max_distance: int, most: int) -> int:
    is_whole = isinstance(max_distance, int) and not isinstance(max_distance, bool)
    if not is_whole or not 1 <= max_distance <= most:
        raise ValueError(
            "max_distance, where the rest begins, must be a whole number ≥ 1; "
            f"got max_distance={shorten(max_distance)}, and the most is {most}. "
            "A distance beyond the grid changes nothing: max(H, W) is enough."
        )
    return max_distance


def _are_coarse_rings(reach: int, tile: int, tile_radii: tuple[int, ...]) -> bool:
    are_whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (tile, *tile_radii))
    rising = are_whole and all(low < high for low, high in pairwise((0, *tile_radii)))
    fits = are_whole and bool(tile_radii) and rising and tile > reach
    return fits and tile * (tile_radii[-1] + 1) <= LARGEST_RADIUS
