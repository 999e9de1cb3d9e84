"""Cached and overlapping launches of Triton kernels. This module imports triton.

For every launch Triton inspects each argument to find the compiled kernel that fits. With the many
strides and constants of our kernels, that takes longer than a small grid takes to compute. So a
launch like an earlier one goes straight to that one's kernel.

On GPUs of compute capability 9.0 and newer, a kernel launched with `overlapping()` may start before
the one before it ends: as soon as all programs of that one have ended or allowed it
(`gdc_launch_dependents`). Two rules keep anybody from reading what is not yet written:
- The first kernel of a row of such launches is launched as any other.
- The others wait (`gdc_wait`) before they read what an earlier one writes, and before they write
  what an earlier one reads or writes. They wait in any case before they end, because what follows
  the row only knows of its last kernel.
"""

import os
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

from ripple_attention.ops.kernels.vector_flags import stripped_promises

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # without assembly, and without overlap

READY: dict[tuple[Any, ...], CompiledKernel] = {}
MOST = 4096  # kept, of all grids that were met
PLAIN = {int, float, bool, str, tuple, type(None)}  # known by their values


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
    kinds = [x if type(x) in PLAIN else _kind(x) for x in arguments]
    kind = (id(kernel), arguments[1].device, *kinds, *options.items())
    ready = READY.get(kind)
    if ready is not None:
        ready[grid](*arguments)
        return
    with stripped_promises():
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


def overlaps() -> bool:
    """Whether kernels may start before others end."""
    return not INTERPRETED and _capability(triton.runtime.driver.active.get_current_device()) >= 90


@cache
def _capability(_: int) -> int:
    """That of the current device, which is asked for once."""
    return int(triton.runtime.driver.active.get_current_target().arch)


def overlapping() -> dict[str, Any]:
    """Options of a launch that may start before the one before it ends."""
    return {"launch_pdl": True} if overlaps() else {}


@cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has; without one, those of an H100 or H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
