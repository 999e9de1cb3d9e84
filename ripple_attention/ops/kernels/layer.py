"""Attention from the qkv projection on: features and weights, then tiles or linear attention."""

# mypy: disable-error-code="arg-type"

from typing import Any

from torch import Tensor

from ripple_attention.ops.common import drop_empty_groups
from ripple_attention.ops.kernels.linear import linear_triton_backward, linear_triton_forward
from ripple_attention.ops.kernels.qkv_features import (
    FeatureOptions,
    FeatureParameters,
    map_backward,
    qkv_features_forward,
    weights_backward,
)
from ripple_attention.ops.kernels.window import tiled_triton_backward, tiled_triton_forward
from ripple_attention.ops.tiling import is_single_window
from ripple_attention.partition import Partition


def fused_ripple_forward(qkv: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_ripple_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k), α and S in
        parts. α is empty where it was given, S where the grid is one window.
    """
    parameters, given, radii, options, eps = _sorted_out(rest)
    q, k, v = qkv.unbind(3)
    sums = not is_single_window(qkv.shape[1], qkv.shape[2], radii)
    phi_q, phi_k, made, partial = qkv_features_forward(
        q, k, v, parameters, options, len(radii) + 1, mask, sums
    )
    if made is not None and mask is not None:
        made = drop_empty_groups(made, Partition(radii), mask)
    alpha = given if made is None else made
    out, denominator, split_state = tiled_triton_forward(
        phi_q, phi_k, v, alpha, radii, eps, partial=partial
    )
    return out, denominator, phi_q, phi_k, alpha.new_empty(0) if made is None else made, split_state


def fused_ripple_backward(
    grad: Tensor,
    out: Tensor,
    denominator: Tensor,
    phi_q: Tensor,
    phi_k: Tensor,
    made: Tensor,
    split_state: Tensor,
    qkv: Tensor,
    mask: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """The gradients of qkv, as one tensor of its shape, of the parameters and of α, if given."""
    parameters, given, radii, options, _ = _sorted_out(rest)
    q, k, v = qkv.unbind(3)
    alpha = made if given is None else given
    grad_phi_q, grad_phi_k, grad_v, grad_alpha = tiled_triton_backward(
        grad, phi_q, phi_k, v, alpha, out, denominator, split_state, radii
    )
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_q, grad_k, all_grad_v = grad_qkv.unbind(3)
    grads: list[Tensor | None] = map_backward(
        grad_phi_q, grad_phi_k, phi_q, phi_k, q, k, parameters, options, mask, grad_q, grad_k
    )
    if given is None:
        if mask is not None:
            grad_alpha = drop_empty_groups(grad_alpha, Partition(radii), mask)
        grads += weights_backward(
            grad_alpha, grad_v, v, parameters, options, mask, all_grad_v, follows=True
        )
        grads.append(None)
    else:
        all_grad_v.copy_(grad_v if mask is None else _without(grad_v, mask))
        grads += [None, None, None, grad_alpha]
    return grad_qkv, *_in_types_of(grads, (*parameters, given))


def fused_linear_forward(qkv: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """See `ops.fused.fused_linear_attention`.

    Returns:
        The output (B, H, W, N, D), and for the backward pass: denominators, φ(q), φ(k) and Sᵀ.
    """
    *learned, activation, scaling, eps = rest
    q, k, v = qkv.unbind(3)
    phi_q, phi_k, _, partial = qkv_features_forward(
        q,
        k,
        v,
        FeatureParameters(*learned),
        FeatureOptions(activation, scaling),
        0,
        mask,
        sums=True,
    )
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
    """The gradients of qkv, as one tensor of its shape, and of the map's parameters."""
    *learned, activation, scaling, _ = rest
    q, k, v = qkv.unbind(3)
    grad_phi_q, grad_phi_k, grad_v = linear_triton_backward(
        grad, phi_q, phi_k, v, out, denominator, state
    )
    grad_qkv = qkv.new_empty(qkv.shape)
    grad_q, grad_k, all_grad_v = grad_qkv.unbind(3)
    map_arguments = FeatureParameters(*learned), FeatureOptions(activation, scaling), mask
    grads = map_backward(grad_phi_q, grad_phi_k, phi_q, phi_k, q, k, *map_arguments, grad_q, grad_k)
    all_grad_v.copy_(grad_v if mask is None else _without(grad_v, mask))
    return grad_qkv, *_in_types_of(grads, learned)


def fused_features_forward(q: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) alone; see `ops.fused.fused_features`."""
    *learned, activation, scaling = rest
    options = FeatureOptions(activation, scaling)
    phi_q, phi_k, _, _ = qkv_features_forward(q, k, q, FeatureParameters(*learned), options)
    return phi_q, phi_k


def fused_features_backward(
    grad_phi_q: Tensor, grad_phi_k: Tensor, phi_q: Tensor, phi_k: Tensor, q: Tensor, k: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and the map's parameters."""
    *learned, activation, scaling = rest
    grad_q, grad_k = q.new_empty(q.shape), k.new_empty(k.shape)
    settings = FeatureParameters(*learned), FeatureOptions(activation, scaling), None
    grads = map_backward(grad_phi_q, grad_phi_k, phi_q, phi_k, q, k, *settings, grad_q, grad_k)
    return grad_q, grad_k, *_in_types_of(grads, learned)


def fused_weights_forward(v: Tensor, *rest: Any) -> Tensor:
    """α alone; see `ops.fused.fused_weights`."""
    *learned, groups, sticks, balanced, truncated, threshold = rest
    options = FeatureOptions("", "none", sticks, balanced, truncated, threshold)
    alpha = qkv_features_forward(
        None, None, v, FeatureParameters(None, None, None, *learned), options, groups
    )
    return alpha[2]


def fused_weights_backward(grad_alpha: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of v, P, p and e."""
    *learned, _, sticks, balanced, truncated, threshold = rest
    grad_v = v.new_empty(v.shape)
    options = FeatureOptions("", "none", sticks, balanced, truncated, threshold)
    settings = FeatureParameters(None, None, None, *learned), options, None
    grads = weights_backward(grad_alpha, None, v, *settings, grad_v)
    return grad_v, *_in_types_of(grads, learned)


def _without(grad: Tensor, mask: Tensor) -> Tensor:
    return grad.masked_fill(mask[..., None, None], 0)


def _in_types_of(grads: Any, like: Any) -> tuple[Tensor | None, ...]:
    pairs = zip(grads, like, strict=True)
    return tuple(g if g is None else g.to(x.dtype) for g, x in pairs)


def _sorted_out(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Parameters, α if given, radii, options and eps."""
    *learned, given, radii, activation, scaling, sticks, balanced, truncated, threshold, eps = rest
    options = FeatureOptions(activation, scaling, sticks, balanced, truncated, threshold)
    return FeatureParameters(*learned), given, list(radii), options, eps
