"""Where the Triton kernels can run, and their functions, imported when first called.

`import ripple_attention` needs torch alone, so triton is not imported here.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The window is walked for every tile: beyond this reach, tables and PyTorch's products are better.
MAX_REACH = 16
MAX_WIDTH = 128

# Grids of up to so many tokens are one window: all pairs cost less than launches for a far part.
WHOLE_TOKENS = 384

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OTHERS = "'auto', 'tiled', 'table' or 'naive' can run"


def triton_refusal(
    name: str, device: torch.device, dtype: torch.dtype, width: int, radii: tuple[int, ...]
) -> str:
    """Why an implementation by kernels cannot run, in words, or "" where it can.

    Args:
        name: "tiled_triton", "table_triton" or "naive_triton".
        device: Of the inputs.
        dtype: Of the inputs.
        width: The larger of the widths of features and values.
        radii: The partition's.
    """
    reason = _machine_refusal(device.type, device.index)
    if not reason and dtype not in DTYPES:
        reason = f"needs float32, bfloat16 or float16 inputs; got {dtype}"
    if not reason and name == "tiled_triton" and radii[-1] > MAX_REACH:
        reason = f"needs a last box of radius ≤ {MAX_REACH}; got {radii[-1]}"
    if not reason and width > MAX_WIDTH:
        reason = f"needs at most {MAX_WIDTH} features and value channels a head; got {width}"
    return f"implementation={name!r} {reason}. {OTHERS}." if reason else ""


def _machine_refusal(kind: str, index: int | None) -> str:
    if find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted and kind == "cpu":
        return ""
    if kind != "cuda":
        return f"needs tensors on an NVIDIA GPU (or TRITON_INTERPRET=1); got {kind!r} tensors"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU; got one of AMD"
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        return f"needs a GPU of compute capability 8.0 or newer; got {capability}"
    return ""


# `torch.compiler.assume_constant_result` does this, but imports torch._dynamo, and so triton.
_machine_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_whole(height: int, width: int, radii: Sequence[int]) -> bool:
    """Whether `tiled_triton` takes a grid as one window, with no far part."""
    return max(WHOLE_TOKENS, (8 + 2 * radii[-1]) ** 2) >= height * width


def far_sums_like(v: Tensor, num_features: int, radii: Sequence[int]) -> Tensor:
    """Room for what `tiled_triton` keeps of its far sum (see `far_triton.cut_kernel`)."""
    B, H, W, N, E = v.shape
    if is_whole(H, W, radii):
        return v.new_empty(0)
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    return v.new_empty(B, N, 2 * E + 3, num_features, dtype=dtype)


def auto_takes_kernels(
    name: str, device: torch.device, dtype: torch.dtype, width: int, radii: tuple[int, ...]
) -> bool:
    """Whether `implementation="auto"` may choose these kernels. Arguments as above."""
    return device.type == "cuda" and not triton_refusal(name, device, dtype, width, radii)


def late(module: str, function: str) -> Callable[..., Any]:
    """A function of a module that imports triton, which is imported at the first call."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"ripple_attention.ops.{module}"), function)(*args)

    return call
