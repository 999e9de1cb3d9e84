"""Partitions: which tokens ripple out together around a query."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """A split of the grid, seen from any query, into vicinal groups bounded by square boxes.

    Group 0 is the box of radius `radii[0]` around the query, group g is the box of `radii[g]`
    without the one before it, and the last group is the rest: every token outside the last box.
    Distance is Chebyshev, `max(|Δrow|, |Δcolumn|)`; boxes are clipped at the border of the grid.

    Args:
        radii: Box radii, strictly increasing, each ≥ 0, at least one.

    >>> chebyshev(4).radii
    (0, 1, 2, 3)
    >>> chebyshev(4).num_groups
    5
    """

    radii: tuple[int, ...]

    def __init__(self, radii: Iterable[int]):
        radii = tuple(radii) if isinstance(radii, Iterable) else ()
        whole = all(isinstance(radius, int) and not isinstance(radius, bool) for radius in radii)
        rising = all(low < high for low, high in pairwise(radii))
        if not radii or not whole or not rising or radii[0] < 0:
            raise ValueError(
                "a partition needs at least one radius, all of them whole, at least 0 and strictly "
                f"increasing; got {radii=}. Use chebyshev(max_distance) or "
                "logarithmic(max_distance) for the usual ones."
            )
        object.__setattr__(self, "radii", radii)

    @property
    def num_groups(self) -> int:
        """G: one group for each box, and the rest."""
        return len(self.radii) + 1

    @property
    def reach(self) -> int:
        """The radius of the last box: tokens farther away than this are the rest."""
        return self.radii[-1]

    def group_of_distance(self, size: int, device: torch.device | str | None = None) -> Tensor:
        """The group of each distance 0 … size − 1: the count of boxes that do not hold it.

        >>> logarithmic(3).group_of_distance(6)
        tensor([0, 1, 2, 2, 3, 3])
        """
        # Made on the device: a copy to it would wait, and could not be part of a CUDA graph.
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
        (row, column), (height, width) = query, grid_size
        if not (0 <= row < height and 0 <= column < width):
            raise ValueError(f"the query must lie inside the grid; got {query=} and {grid_size=}")
        down = (torch.arange(height) - row).abs()[:, None]
        across = (torch.arange(width) - column).abs()[None, :]
        return self.group_of_distance(max(grid_size))[torch.maximum(down, across)]

    def pair_groups(
        self, grid_size: tuple[int, int], device: torch.device | str | None = None
    ) -> Tensor:
        """The group of every key for every query, tokens in raster order.

        Returns:
            int64 tensor (L, L), L = H·W; symmetric.
        """
        height, width = grid_size
        rows = torch.arange(height, device=device).repeat_interleave(width)
        columns = torch.arange(width, device=device).repeat(height)
        down = (rows[:, None] - rows).abs()
        across = (columns[:, None] - columns).abs()
        return self.group_of_distance(max(grid_size), device)[torch.maximum(down, across)]


def chebyshev(max_distance: int) -> Partition:
    """Rings one token thick: distances 0, 1, …, max_distance − 1, then the rest.

    Args:
        max_distance: R_max ≥ 1. It may be larger than the grid: rings outside are empty.
    """
    return Partition(range(_checked_distance(max_distance)))


def logarithmic(max_distance: int) -> Partition:
    """Rings that double in thickness (distance 0; 1; 2–3; 4–7; …) until `max_distance` is covered.

    >>> logarithmic(5).radii
    (0, 1, 3, 7)
    """
    radii = [0]
    while radii[-1] < _checked_distance(max_distance):
        radii.append(2 * radii[-1] + 1)
    return Partition(radii)


def dense(grid_size: tuple[int, int]) -> Partition:
    """A ring for every distance that occurs on the grid.

    >>> dense((3, 5)).num_groups
    5
    """
    if not isinstance(grid_size, tuple | list) or len(grid_size) != 2:
        raise ValueError(f"grid_size must be (H, W); got {grid_size!r}")
    return chebyshev(max(max(grid_size) - 1, 1))


def _checked_distance(max_distance: int) -> int:
    if not isinstance(max_distance, int) or isinstance(max_distance, bool) or max_distance < 1:
        raise ValueError(
            "max_distance counts the rings before the rest and must be a whole number ≥ 1; "
            f"got {max_distance=!r}"
        )
    return max_distance
