"""Launches of Triton kernels that cost little when they repeat.

For every launch Triton asks each argument what it is, to find the compiled kernel that fits; of our
kernels, with strides and constants, that takes longer than small grids take to compute. A launch
like an earlier one goes to that one's kernel instead. This module imports triton.
"""

from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel

READY: dict[tuple[Any, ...], CompiledKernel] = {}
MOST = 4096  # kept, of all grids that were met


def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
    """Runs a kernel for all images, as many at a time as a grid's third dimension takes.

    Args:
        kernel: Of Triton, whose first argument is the first image.
        grid: Programs; the third number is the images.
        arguments: All others, by position. The first is a tensor on the current device.
        options: Of the launch.
    """
    for first in range(0, grid[2], 65535):
        images = min(grid[2] - first, 65535)
        _launch_once(kernel, (grid[0], grid[1], images), (first, *arguments), options)


def _launch_once(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    kind = (id(kernel), arguments[1].device, *map(_kind, arguments), *options.items())
    ready = READY.get(kind)
    if ready is not None:
        ready[grid](*arguments)
        return
    compiled = kernel[grid](*arguments, **options)
    if isinstance(compiled, CompiledKernel):  # interpreted ones are not
        if len(READY) >= MOST:
            READY.clear()
        READY[kind] = compiled


def _kind(argument: Any) -> Any:
    """All that decides which compiled kernel takes it; of numbers and tuples, the value."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument
