"""Registration with `torch.library`: compiled code, fake tensors and autograd see one operator."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, safe_divide, without_autocast

Forward = Callable[..., tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def register(
    name: str,
    forward: Forward,
    backward: Backward,
    inference: Callable[..., Tensor] | None = None,
    extra_output: Callable[[Tensor, int, list[int]], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """Makes the operators `ripple_attention::{name}` and `…_backward` of a pair of functions.

    Args:
        name: The name of the algorithm.
        forward: (q, k, v, spatial_weights, radii, eps) → output and denominator + eps.
        backward: (grad, q, k, v, spatial_weights, output, denominator, radii) → gradients of q, k,
            v and the weights. The denominator is the forward's second output, eps included.
        inference: As `forward`, but of the output alone: taken where no gradient is asked for.
        extra_output: Where the forward has a third output, which the backward gets after the
            denominator: (v, features, radii) → room for it.

    Returns:
        The differentiable operator: (q, k, v, spatial_weights, radii, eps) → output. Its attribute
        `shared` is the same with one share more, see `register_shared`.
    """
    inputs, third = "Tensor q, Tensor k, Tensor v, Tensor spatial_weights", extra_output is not None
    forward_op = torch.library.custom_op(
        f"ripple_attention::{name}",
        in_full_precision(forward),
        mutates_args=(),
        schema=f"({inputs}, int[] radii, float eps) -> (Tensor, Tensor{', Tensor' * third})",
    )
    backward_op = torch.library.custom_op(
        f"ripple_attention::{name}_backward",
        in_full_precision(_row_major(backward)),
        mutates_args=(),
        schema=f"(Tensor grad, {inputs}, Tensor out, Tensor denominator"
        f"{', Tensor extra' * third}, int[] radii) -> (Tensor, Tensor, Tensor, Tensor)",
    )

    @forward_op.register_fake
    def _(
        q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], *_: Any
    ) -> Any:
        results = v.new_empty(v.shape), v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
        if extra_output is None:
            return results
        return *results, extra_output(v, q.shape[-1], radii)

    @backward_op.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, *_: Any) -> Any:
        return tuple(x.new_empty(x.shape) for x in (q, k, v, spatial_weights))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.radii, _ = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *backward_op(grad, *ctx.saved_tensors, ctx.radii), None, None

    forward_op.register_autograd(differentiate, setup_context=setup_context)
    refuse_second_derivatives(backward_op, f"implementation={name!r}", "use implementation='naive'")

    def operator(*args: Any) -> Tensor:
        return forward_op(*args)[0]

    shared = register_shared(name, forward, backward_op, extra_output)
    operator.shared = shared  # type: ignore[attr-defined]
    if inference is None:
        return operator
    inference_op = torch.library.custom_op(
        f"ripple_attention::{name}_inference",
        in_full_precision(inference),
        mutates_args=(),
        schema=f"({inputs}, int[] radii, float eps) -> Tensor",
    )

    @inference_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return v.new_empty(v.shape)

    def either(*args: Any) -> Tensor:
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in args[:4])
        return operator(*args) if learns else inference_op(*args)

    either.shared = shared  # type: ignore[attr-defined]
    return either


def register_shared(
    name: str,
    forward: Forward,
    backward_op: Any,
    extra_output: Callable[[Tensor, int, list[int]], Tensor] | None,
) -> Callable[..., Tensor]:
    """Makes `ripple_attention::{name}_shared`: an algorithm whose mean has one share more.

        out = (numerator of the algorithm + another) ÷ (its denominator + another)

    Every algorithm can: its gradients depend on the others only by the output and the denominator
    that its backward pass is given. Where its own denominator is 0 it gets no gradient.

    Returns:
        (q, k, v, spatial_weights, numerator, total, radii, eps) → output, where the other share is
        `numerator` (B, H, W, N, E) ÷ `total` (B, H, W, N), in the type of sums.
    """
    inputs, third = "Tensor q, Tensor k, Tensor v, Tensor spatial_weights", extra_output is not None

    def run(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *more: Any) -> tuple[Tensor, ...]:
        numerator, total, radii, eps = more
        own, own_total, *extra = forward(q, k, v, weights, radii, eps)
        denominator = own_total + total
        sums = own.to(numerator.dtype) * own_total.unsqueeze(-1) + numerator
        out = safe_divide(sums, denominator.unsqueeze(-1)).to(v.dtype)
        return out, denominator, denominator.masked_fill(own_total == 0, 0), *extra

    op = torch.library.custom_op(
        f"ripple_attention::{name}_shared",
        in_full_precision(run),
        mutates_args=(),
        schema=f"({inputs}, Tensor numerator, Tensor total, int[] radii, float eps) -> "
        f"(Tensor, Tensor, Tensor{', Tensor' * third})",
    )

    @op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *more: Any) -> Any:
        total = (v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v)) for _ in range(2))
        results = v.new_empty(v.shape), *total
        return (
            results if extra_output is None else (*results, extra_output(v, q.shape[-1], more[2]))
        )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, weights, _, _, ctx.radii, _ = inputs
        ctx.save_for_backward(q, k, v, weights, *output)

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weights, out, denominator, own, *extra = ctx.saved_tensors
        grads = backward_op(grad, q, k, v, weights, out, own, *extra, ctx.radii)
        grad_numerator = safe_divide(grad.to(denominator.dtype), denominator.unsqueeze(-1))
        grad_total = -(grad_numerator * out).sum(-1)
        return *grads, grad_numerator, grad_total, None, None

    op.register_autograd(differentiate, setup_context=setup_context)
    return lambda *args: op(*args)[0]


def refuse_second_derivatives(backward_op: Any, what: str, remedy: str) -> None:
    """Has a gradient's own gradient answered with what can be done instead."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{what} has first derivatives only; for gradients of gradients {remedy}"
        )

    backward_op.register_autograd(refuse)


def _row_major(backward: Backward) -> Backward:
    """Gradients laid out as the fake ones, as compiled code expects: an einsum's need not be."""

    @wraps(backward)
    def wrapper(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, weights = backward(*args)
        return q.contiguous(), k.contiguous(), v.contiguous(), weights.contiguous()

    return wrapper


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps autocast out of an operator's body: its sums are float32 or better."""

    @wraps(function)
    def wrapper(first: Tensor, *args: Any) -> Any:
        with without_autocast(first):
            return function(first, *args)

    return wrapper


def lazy_import(module: str, function: str) -> Callable[..., Any]:
    """A function of `ops.kernels`, which import triton: at the first call, not before."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"ripple_attention.ops.kernels.{module}"), function)(*args)

    return call
