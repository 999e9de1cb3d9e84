"""Checks of the operators' inputs, and their type under autocast.

Also whether PyTorch traces an export, or differentiates in a way that custom operators do not know.
"""

import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad

from ripple_attention.checks import DTYPES, REMEDY, describe, is_dense, shorten
from ripple_attention.ops.common import accumulation_dtype, autocast_dtype
from ripple_attention.partition import Partition


def in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts as autocast casts for matrix products: to its type, float64 and integers excepted."""
    first = tensors[0]
    dtype = autocast_dtype(first) if isinstance(first, Tensor) else None
    if dtype is None:
        return tensors
    return tuple(_cast(x, dtype) for x in tensors)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    floats = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if floats else x  # the checks that follow refuse what is no tensor


def is_exporting() -> bool:
    """Whether `torch.export` traces; torch 2.11's own function says so of `torch.compile`, too."""
    return torch.compiler._is_exporting_flag


def is_transformed(*tensors: Tensor) -> bool:
    """Whether PyTorch takes a derivative that custom operators do not support.

    Those are derivatives in forward mode (dual numbers, `torch.func.jvp`) and by `torch.func.grad`.
    """
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if forward_ad.unpack_dual(x).tangent is not None:
            return True
    return in_function_transform() and any(map(_in_functional_gradient, tensors))


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` is at work: `grad`, `vmap` and others."""
    return not torch.compiler.is_compiling() and peek_interpreter_stack() is not None


def _in_functional_gradient(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if is_gradtrackingtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def shapes(**tensors: Tensor) -> str:
    """Names and shapes, for messages."""
    return ", ".join(f"{name}.shape={tuple(x.shape)}" for name, x in tensors.items())


def check_operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    partition: Partition,
    key_padding_mask: Tensor | None,
    prefix_groups: int = 0,
) -> None:
    """Refuses operands that do not fit together.

    Args:
        prefix_groups: How many groups of prefix tokens come before the partition's.
    """
    check_qkv(q, k, v)
    if not isinstance(partition, Partition):
        raise ValueError(
            f"partition must be a Partition; got {shorten(partition)}. "
            "Use chebyshev(max_distance) or logarithmic(max_distance)."
        )
    check_weights(spatial_weights, v, partition, prefix_groups)
    check_mask(key_padding_mask, v)


def check_weights(
    spatial_weights: Tensor, v: Tensor, partition: Partition, prefix_groups: int = 0
) -> None:
    """Refuses weights that are not those of these values for a partition."""
    check_dense("spatial_weights", spatial_weights)
    expected = (*v.shape[:-1], prefix_groups + partition.num_groups)
    if spatial_weights.shape != expected:
        raise ValueError(
            "spatial_weights must be (B, H, W, N, G) with the grid and heads of v and one weight "
            f"for each of the partition's G={partition.num_groups} groups"
            f"{', after one for prefix tokens' * prefix_groups}, so {expected}; "
            f"got {shapes(spatial_weights=spatial_weights, v=v)}. Make them for this partition."
        )
    if spatial_weights.dtype != v.dtype and spatial_weights.dtype != accumulation_dtype(v):
        raise ValueError(
            "spatial_weights must have the type of v or the type its sums are kept in, "
            f"{accumulation_dtype(v)}; got {spatial_weights.dtype=} with {v.dtype=}. "
            "Cast them with spatial_weights.to(...)."
        )
    if spatial_weights.device != v.device:
        raise ValueError(
            "spatial_weights must be on the device of v; got "
            f"{str(spatial_weights.device)=} and {str(v.device)=}. Move them with .to(v.device)."
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses all but three grids of one type, device and shape; the values' width may differ."""
    check_dense("q", q)
    check_dense("k", k)
    check_dense("v", v)
    if not q.dim() == k.dim() == v.dim() == 5:
        raise ValueError(
            "q, k and v must be heads-last grids (B, H, W, N, channels); "
            f"got {shapes(q=q, k=k, v=v)}. For tokens in a row use x.unflatten(1, (H, W))."
        )
    if q.shape != k.shape or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "q and k must have the same shape (B, H, W, N, M), and v their batch, grid and heads "
            f"(B, H, W, N, E); got {shapes(q=q, k=k, v=v)}. Only their last axes may differ, E "
            "from M."
        )
    if not (v.dtype in DTYPES and q.dtype == k.dtype == v.dtype):
        raise ValueError(
            "q, k and v must share one floating-point type, float64, float32, bfloat16 or float16; "
            f"got {q.dtype=}, {k.dtype=}, {v.dtype=}. Cast with .to(...) or use torch.autocast."
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            "q, k and v must be on one device; "
            f"got {str(q.device)=}, {str(k.device)=}, {str(v.device)=}. Move them with .to(...)."
        )


def check_dense(name: str, x: Tensor) -> None:
    """Refuses what is no dense tensor."""
    if not is_dense(x):
        raise ValueError(f"{name} must be a dense tensor; got {describe(x)}. {REMEDY}")


def check_mask(mask: Tensor | None, v: Tensor) -> None:
    """Refuses a key padding mask that is not bool (B, H, W) on the device of v."""
    if mask is None:
        return
    if not is_dense(mask):
        raise ValueError(
            "key_padding_mask must be a bool tensor (B, H, W), a dense one; got "
            f"{describe(mask)}. {REMEDY}"
        )
    if mask.dtype != torch.bool or mask.shape != v.shape[:3]:
        raise ValueError(
            f"key_padding_mask must be bool (B, H, W) = {tuple(v.shape[:3])}, True for padded "
            f"keys; got {mask.dtype=} and {shapes(mask=mask)}. A 0/1 mask needs .bool()."
        )
    if mask.device != v.device:
        raise ValueError(
            "key_padding_mask must be on the device of v; "
            f"got {str(mask.device)=} and {str(v.device)=}. Move it with .to(v.device)."
        )
