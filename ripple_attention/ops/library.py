"""Registration with `torch.library`: compiled code, fake tensors and autograd see one operator."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ripple_attention.ops.common import accumulation_dtype, without_autocast

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
        The differentiable operator: (q, k, v, spatial_weights, radii, eps) → output.
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

    return either


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
