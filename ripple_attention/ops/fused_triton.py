"""Attention from the qkv projection on: the fused front, then tiles, or linear attention."""

from typing import Any

from torch import Tensor

from ripple_attention.functional import drop_empty_groups
from ripple_attention.ops.front_triton import (
    FrontOptions,
    FrontParameters,
    front_backward,
    front_forward,
)
from ripple_attention.ops.linear_triton import linear_triton_backward, linear_triton_forward
from ripple_attention.ops.tiled_triton import tiled_triton_backward, tiled_triton_forward
from ripple_attention.ops.triton_support import is_whole
from ripple_attention.partition import Partition


def fused_ripple_forward(qkv: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_ripple_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k), α and S in
        parts, which is empty where the grid is one window.
    """
    parameters, radii, options, eps = _sorted_out(rest)
    q, k, v = qkv.unbind(3)
    sums = not is_whole(qkv.shape[1], qkv.shape[2], radii)
    phi_q, phi_k, alpha, partial = front_forward(q, k, v, parameters, options, mask, sums)
    assert alpha is not None
    if mask is not None:
        alpha = drop_empty_groups(alpha, Partition(radii), mask)
    out, denominator, cut = tiled_triton_forward(
        phi_q, phi_k, v, alpha, radii, eps, partial=partial
    )
    assert denominator is not None
    return out, denominator, phi_q, phi_k, alpha, cut


def fused_ripple_backward(
    grad: Tensor,
    out: Tensor,
    denominator: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    alpha: Tensor,
    cut: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The gradients of qkv, as one tensor of its shape, and of the six parameters."""
    parameters, radii, options, _ = _sorted_out(rest)
    v = qkv[:, :, :, 2]
    grad_phi_q, grad_phi_k, grad_v, grad_alpha = tiled_triton_backward(
        grad, phi_q, phi_k, v, alpha, out, denominator, cut, radii
    )
    if mask is not None:
        grad_alpha = drop_empty_groups(grad_alpha, Partition(radii), mask)
    return _through_the_front(
        grad_phi_q, grad_phi_k, grad_alpha, grad_v, qkv, parameters, options, mask
    )


def fused_linear_forward(qkv: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_linear_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k) and Sᵀ.
    """
    *parameters, scaling, eps = rest
    q, k, v = qkv.unbind(3)
    phi_q, phi_k, _, partial = front_forward(
        q, k, v, FrontParameters(*parameters), FrontOptions(scaling), mask, sums=True
    )
    assert partial is not None
    out, denominator, state = linear_triton_forward(phi_q, partial, eps)
    return out, denominator, phi_q, phi_k, state


def fused_linear_backward(
    grad: Tensor,
    out: Tensor,
    denominator: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    state: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The gradients of qkv, as one tensor of its shape, and of the three parameters."""
    *tensors, scaling, _ = rest
    parameters, v = FrontParameters(*tensors), qkv[:, :, :, 2]
    grads = linear_triton_backward(grad, phi_q, phi_k, v, out, denominator, state)
    front = parameters, FrontOptions(scaling), mask
    return _through_the_front(grads[0], grads[1], None, grads[2], qkv, *front)


def _through_the_front(
    grad_phi_q: Tensor,
    grad_phi_k: Tensor,
    grad_alpha: Tensor | None,
    grad_v: Tensor,
    qkv: Tensor,
    parameters: FrontParameters,
    options: FrontOptions,
    mask: Tensor | None,
) -> tuple[Tensor, ...]:
    """The gradients of qkv and of the parameters, in their types."""
    q, k, v = qkv.unbind(3)
    grad_qkv = qkv.new_empty(qkv.shape)
    *_, grads = front_backward(
        grad_phi_q, grad_phi_k, grad_alpha, grad_v, q, k, v, parameters, options, mask, grad_qkv
    )
    pairs = zip(grads, parameters, strict=True)
    return grad_qkv, *(g.to(p.dtype) for g, p in pairs if g is not None and p is not None)


def _sorted_out(rest: tuple[Any, ...]) -> tuple[FrontParameters, list[int], FrontOptions, float]:
    *parameters, radii, scaling, balanced, halt_threshold, eps = rest
    options = FrontOptions(scaling, balanced, halt_threshold)
    return FrontParameters(*parameters), list(radii), options, eps
