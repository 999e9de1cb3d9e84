"""Operators of `torch.library`: compiled code, fake tensors and autograd see one operator.

An eager call passes `torch.library` by, which takes longer to reach a kernel than a small layer to
compute: it runs the same functions under an `autograd.Function`.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from ripple_attention.ops.common import accumulation_dtype, autocast_dtype, safe_divide

Forward = Callable[..., tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


class Operator:
    """`ripple_attention::{name}`: a function of tensors, and then of what is not a tensor.

    Args:
        name: Of the operator.
        schema: What it takes and returns, as torch.library writes it.
        body: The function. It runs without autocast, and returns no views of what it takes.
        fake: The same without values.
    """

    def __init__(
        self, name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]
    ) -> None:
        self.body = in_full_precision(body)
        self.registered: Any = torch.library.custom_op(
            f"ripple_attention::{name}", self.body, mutates_args=(), schema=schema
        )
        self.registered.register_fake(fake)
        self.function: Any = None

    def register_autograd(
        self,
        differentiate: Callable[..., Any],
        setup_context: Callable[..., None],
        results: int = 1,
    ) -> None:
        """Says how the first `results` outputs are differentiated; others have no gradients."""
        self.registered.register_autograd(differentiate, setup_context=setup_context)
        body = self.body

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = body(*inputs)
                setup_context(ctx, inputs, output)
                if isinstance(output, tuple):
                    ctx.mark_non_differentiable(*output[results:])
                    ctx.set_materialize_grads(results > 1)  # else zeros are made, for nothing
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if grads[0] is None:
                    return (None,) * len(ctx.needs_input_grad)
                return differentiate(ctx, *grads)

        self.function = Function

    def refuse_derivatives(self, what: str, remedy: str) -> None:
        """Has a gradient's own gradient answered with what can be done instead."""

        def refuse(*_: Any) -> Any:
            raise NotImplementedError(
                f"{what} has first derivatives only; for gradients of gradients {remedy}"
            )

        self.registered.register_autograd(refuse)

    def __call__(self, *inputs: Any) -> Any:
        if is_watched(*inputs):
            return self.registered(*inputs)
        if not (torch.is_grad_enabled() and requires_gradient(*inputs)):
            return self.body(*inputs)
        return (self.registered if self.function is None else self.function.apply)(*inputs)


def is_watched(*inputs: Any) -> bool:
    """Whether something sees operators: a compiler, a mode, a profiler, or a tensor's class."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    if torch.autograd._profiler_enabled() or peek_interpreter_stack() is not None:
        return True
    for x in inputs:  # plain loops: every call of a layer runs them
        if isinstance(x, Tensor) and (type(x) not in (Tensor, nn.Parameter) or x.is_meta):
            return True
    return False


def requires_gradient(*inputs: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


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

    def fake(
        q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, radii: list[int], *_: Any
    ) -> Any:
        results = v.new_empty(v.shape), v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v))
        if extra_output is None:
            return results
        return *results, extra_output(v, q.shape[-1], radii)

    forward_op = Operator(
        name,
        f"({inputs}, int[] radii, float eps) -> (Tensor, Tensor{', Tensor' * third})",
        forward,
        fake,
    )
    backward_op = Operator(
        f"{name}_backward",
        f"(Tensor grad, {inputs}, Tensor out, Tensor denominator{', Tensor extra' * third}, "
        "int[] radii) -> (Tensor, Tensor, Tensor, Tensor)",
        _row_major(backward),
        lambda grad, *given: tuple(x.new_empty(x.shape) for x in given[:4]),
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.radii, _ = inputs
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return *backward_op(grad, *ctx.saved_tensors, ctx.radii), None, None

    forward_op.register_autograd(differentiate, setup_context)
    backward_op.refuse_derivatives(f"implementation={name!r}", "use implementation='naive'")

    def operator(*args: Any) -> Tensor:
        return forward_op(*args)[0]

    shared = register_shared(name, forward, backward_op, extra_output)
    operator.shared = shared  # type: ignore[attr-defined]
    if inference is None:
        return operator
    inference_op = Operator(
        f"{name}_inference",
        f"({inputs}, int[] radii, float eps) -> Tensor",
        inference,
        lambda q, k, v, *_: v.new_empty(v.shape),
    )

    def either(*args: Any) -> Tensor:
        learns = torch.is_grad_enabled() and requires_gradient(*args)
        return operator(*args) if learns else inference_op(*args)

    either.shared = shared  # type: ignore[attr-defined]
    return either


def register_shared(
    name: str,
    forward: Forward,
    backward_op: Operator,
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

    def fake(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, *more: Any) -> Any:
        total = (v.new_empty(v.shape[:-1], dtype=accumulation_dtype(v)) for _ in range(2))
        results = v.new_empty(v.shape), *total
        return (
            results if extra_output is None else (*results, extra_output(v, q.shape[-1], more[2]))
        )

    op = Operator(
        f"{name}_shared",
        f"({inputs}, Tensor numerator, Tensor total, int[] radii, float eps) -> "
        f"(Tensor, Tensor, Tensor{', Tensor' * third})",
        run,
        fake,
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

    op.register_autograd(differentiate, setup_context)
    return lambda *args: op(*args)[0]


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
        if autocast_dtype(first) is None:
            return function(first, *args)
        torch.set_autocast_enabled(first.device.type, False)
        try:
            return function(first, *args)
        finally:
            torch.set_autocast_enabled(first.device.type, True)

    return wrapper


def lazy_import(module: str, function: str) -> Callable[..., Any]:
    """A function of `ops.kernels`, which import triton: at the first call, not before."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"ripple_attention.ops.kernels.{module}"), function)(*args)

    return call
