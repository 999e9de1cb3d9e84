"""Attention from the qkv projection on: the fused front, then tiles, or linear attention."""

from collections.abc import Iterator
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
from ripple_attention.partition import Partition


def fused_ripple_forward(qkv: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_ripple_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k), α and Sᵀ.
    """
    parameters, radii, options, eps = _sorted_out(rest)
    q, k, v = qkv.unbind(3)
    phi_q, phi_k, alpha, state = front_forward(q, k, v, parameters, options, mask)
    assert alpha is not None
    if mask is not None:
        alpha = drop_empty_groups(alpha, Partition(radii), mask)
    out, denominator = tiled_triton_forward(phi_q, phi_k, v, alpha, radii, eps, state.mT)
    return out, denominator, phi_q, phi_k, alpha, state.mT


def fused_ripple_backward(
    grad: Tensor,
    out: Tensor,
    denominator: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    alpha: Tensor,
    state: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The gradients of qkv, as one tensor of its shape, and of the six parameters."""
    parameters, radii, options, _ = _sorted_out(rest)
    q, k, v = qkv.unbind(3)
    grad_phi_q, grad_phi_k, grad_v, grad_alpha = tiled_triton_backward(
        grad, phi_q, phi_k, v, alpha, out, denominator, radii, state
    )
    if mask is not None:
        grad_alpha = drop_empty_groups(grad_alpha, Partition(radii), mask)
    grad_qkv = qkv.new_empty(qkv.shape)
    *_, grads = front_backward(
        grad_phi_q, grad_phi_k, grad_alpha, grad_v, q, k, v, parameters, options, mask, grad_qkv
    )
    return grad_qkv, *_in_their_types(grads, parameters)


def fused_linear_forward(
    qkv: Tensor,
    mask: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor,
    scaling: Any,
    eps: float,
) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_linear_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k) and Sᵀ.
    """
    q, k, v = qkv.unbind(3)
    front = front_forward(q, k, v, FrontParameters(w1, w2, b2), FrontOptions(scaling), mask)
    phi_q, phi_k, _, state = front
    out, denominator = linear_triton_forward(phi_q, state.mT, eps)
    return out, denominator, phi_q, phi_k, state.mT


def fused_linear_backward(
    grad: Tensor,
    out: Tensor,
    denominator: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    state: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    b2: Tensor,
    scaling: Any,
    eps: float,
) -> tuple[Tensor, ...]:
    """The gradients of qkv, as one tensor of its shape, and of the three parameters."""
    q, k, v = qkv.unbind(3)
    grad_phi_q, grad_phi_k, grad_v = linear_triton_backward(
        grad, phi_q, phi_k, v, out, denominator, state
    )
    grad_qkv = qkv.new_empty(qkv.shape)
    parameters, options = FrontParameters(w1, w2, b2), FrontOptions(scaling)
    *_, grads = front_backward(
        grad_phi_q, grad_phi_k, None, grad_v, q, k, v, parameters, options, mask, grad_qkv
    )
    return grad_qkv, *_in_their_types(grads, parameters)


def _in_their_types(grads: FrontParameters, parameters: FrontParameters) -> Iterator[Tensor]:
    for grad, parameter in zip(grads, parameters, strict=True):
        if grad is not None and parameter is not None:
            yield grad.to(parameter.dtype)


def _sorted_out(rest: tuple[Any, ...]) -> tuple[FrontParameters, list[int], FrontOptions, float]:
    *parameters, radii, scaling, balanced, halt_threshold, eps = rest
    options = FrontOptions(scaling, balanced, halt_threshold)
    return FrontParameters(*parameters), list(radii), options, eps
