"""What runs where, asked of the dispatcher: map × weights × reach × type × width of a head."""

from collections.abc import Callable
from functools import partial
from typing import get_args

import torch

from ripple_attention.dispatch import LARGE_SHARED, Problem, choose
from ripple_attention.feature_maps import FEATURE_MAPS, create_feature_map
from ripple_attention.partition import chebyshev
from ripple_attention.spatial_weights import SpatialWeights, WeightKind
from ripple_lab.reproduce.blocks import block
from ripple_lab.reproduce.markdown import listed, markdown_table

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL_SHARED = 99  # kilobytes a block on GeForce and RTX cards
WIDEST, FARTHEST = 256, 64
SIDES = (64, 128, 256, 512)  # of grids
KERNELS = ("fused", "tiled_triton", "naive_triton", "table_triton")


@block("support-matrix")
def support_matrix() -> str:
    """For each kind of layer and type, the back end it gets and the widest heads that takes."""
    rows = []
    for form, names in _maps().items():
        reach = _largest(FARTHEST, partial(_unchanged, form))
        rows.append([names, f"≤ {reach}", *(_cell(form, dtype) for dtype in DTYPES)])
    if reach < FARTHEST:
        rows.append(["any", f"> {reach}", *(_far_cell(dtype, reach + 1) for dtype in DTYPES)])
    headings = ["feature map", "R_max", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)]
    return (
        f"{markdown_table(headings, rows, words=len(headings))}\n\nThe back end on NVIDIA GPUs of "
        "compute capability 8.0 or newer, and the widest head that it takes; in brackets where a "
        f"block has {SMALL_SHARED} kB of shared memory (GeForce, RTX). The fused kernels also make "
        f"{listed(_fused_weights())} weights, and take any others from PyTorch. Everything else "
        "(wider heads, float64, CPUs, other GPUs) runs in PyTorch operations."
    )


def _maps() -> dict[str, str]:
    """The names of maps by the form in which kernels make them, "" for those that none makes."""
    forms: dict[str, list[str]] = {}
    for name in FEATURE_MAPS:
        spec = create_feature_map(name, 8).fused_spec()
        form = "" if spec is None else "sines" if spec.w1 is not None else "no sines"
        forms.setdefault(form, []).append(f"`{name}`")
    forms[""] = [*forms.pop("", []), "your own"]  # the last row
    return {form: ", ".join(names) for form, names in forms.items()}


def _fused_weights() -> list[str]:
    kinds: tuple[WeightKind, ...] = get_args(WeightKind)
    return [kind for kind in kinds if SpatialWeights(8, 1, 5, kind).fused_spec() is not None]


def _cell(form: str, dtype: torch.dtype, reach: int = 4, side: int = SIDES[0]) -> str:
    backend = _chosen(form, dtype, reach, side)
    if backend not in KERNELS:
        return f"`{backend}`, PyTorch"
    large, small = (
        _largest(
            WIDEST,
            lambda width, shared=shared: (
                backend  # type: ignore[misc]
                == _chosen(form, dtype, reach, side, width, shared)
            ),
        )
        for shared in (LARGE_SHARED, SMALL_SHARED)
    )
    return f"`{backend}`, {large}" + (f" ({small})" if small != large else "")


def _unchanged(form: str, reach: int) -> bool:
    """Whether a farther reach gets the same back end."""
    return _chosen(form, reach=reach) == _chosen(form)


def _far_cell(dtype: torch.dtype, reach: int) -> str:
    """As `_cell`, and up to which grid."""
    cell = _cell("", dtype, reach)
    alike = [side for side in SIDES if _cell("", dtype, reach, side) == cell]
    return cell if alike == list(SIDES) else f"{cell}, to {alike[-1] ** 2:,} tokens"


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    return max((n for n in range(1, most + 1) if holds(n)), default=0)


def _chosen(
    form: str,
    dtype: torch.dtype = torch.bfloat16,
    reach: int = 4,
    side: int = SIDES[0],
    width: int = 32,
    shared: int = LARGE_SHARED,
) -> str:
    """The back end that a layer gets on an NVIDIA GPU."""
    features, radii = "relu" if form == "no sines" else form, chebyshev(reach).radii
    given = ((side, side), width, width, radii, dtype, "cuda", None, features, "sticks", width)
    return choose(Problem(*given, shared=shared))
