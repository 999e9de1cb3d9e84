"""What arguments may be. Each refusal says the rule, what came and the remedy.

Nothing here reads a number of a tensor: on a GPU that would wait.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

PARTIAL = (torch.masked.MaskedTensor, UninitializedBuffer, UninitializedParameter)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MOST = 2**31 - 1  # of anything that is counted: kernels count in 32 bits
LARGEST = sys.float_info.max


def check_count(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """The number itself, if it is whole and within bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        upper = "" if most == MOST else f" and ≤ {most}"
        raise ValueError(
            f"{name} must be a whole number ≥ {least}{upper}; got {name}={shorten(value)}. "
            "Convert other numbers with int(...)."
        )
    return value


def check_number(name: str, value: Any, least: float = -LARGEST, most: float = LARGEST) -> float:
    """The number itself, if it is finite and within bounds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        bounds = "" if least == -LARGEST else f" from {least} to {most}"
        raise ValueError(
            f"{name} must be a finite number{bounds}; got {name}={shorten(value)}. "
            "Convert other numbers with float(...)."
        )
    return value


def check_flag(name: str, value: Any) -> bool:
    """The value itself, if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} must be True or False; got {name}={shorten(value)}. "
            "Convert other values with bool(...)."
        )
    return value


def check_choice(what: str, value: Any, known: Iterable[str]) -> str:
    """The name itself, if it is one of those known."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}; got {shorten(value)}")
    return value


def check_module(name: str, value: Any) -> None:
    """Refuses what is no module."""
    if not isinstance(value, torch.nn.Module):
        raise TypeError(
            f"{name} must be an nn.Module; got {shorten(value)} of type {type(value).__name__}. "
            "Several go in one nn.ModuleList, a class is called first."
        )


def check_dtype(dtype: Any) -> None:
    """Refuses a type that parameters cannot have."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            "dtype, the type of the parameters, must be float64, float32, bfloat16 or float16; got "
            f"{dtype=}. None is PyTorch's default."
        )


def check_pair(name: str, value: Any, least: int) -> tuple[int, int]:
    """The two numbers of a size or place on a grid, if both are whole and at least `least`."""
    pair = isinstance(value, tuple | list) and len(value) == 2
    if not pair or not all(_is_whole(x) and least <= x <= MOST for x in value):
        raise ValueError(
            f"{name} must be two whole numbers ≥ {least}, rows before columns; got "
            f"{name}={shorten(value)}. For a square grid repeat the side: (side, side)."
        )
    return value[0], value[1]


def _is_whole(x: Any) -> bool:
    return isinstance(x, int | torch.SymInt) and not isinstance(x, bool)


def is_dense(x: Any) -> bool:
    """Whether x is a tensor that has all its numbers: not sparse, nested, masked or yet to come."""
    if not isinstance(x, Tensor) or isinstance(x, PARTIAL):
        return False
    return x.layout is torch.strided and not x.is_nested


def holds_floats(x: Any) -> bool:
    """Whether x is a dense tensor of floats that the operators compute with."""
    return is_dense(x) and x.dtype in DTYPES


def check_floats(name: str, x: Any, shape: str) -> None:
    """Refuses anything but a dense tensor of floats with something on its last axis.

    `shape` names the axes in the message.
    """
    if not holds_floats(x) or x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(
            f"{name} must be floating-point {shape}, a dense tensor; got {describe(x)}. {REMEDY}"
        )


REMEDY = (
    "Convert lists with torch.tensor, arrays with torch.from_numpy, sparse tensors with "
    ".to_dense(), nested ones with .to_padded_tensor(0), masked ones with .to_tensor(0), other "
    "types with .to(torch.float32)."
)


def describe(x: Any) -> str:
    """What came in place of a tensor."""
    if not isinstance(x, Tensor):
        return f"{shorten(x)} of type {type(x).__name__}"
    if x.is_nested or isinstance(x, PARTIAL):
        return f"a {'nested tensor' if x.is_nested else type(x).__name__}, {x.dtype}"
    layout = "" if x.layout is torch.strided else f", {x.layout}"
    return f"shape={tuple(x.shape)}, {x.dtype}{layout} on {x.device}"


def shorten(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of another's class
        text = object.__repr__(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
