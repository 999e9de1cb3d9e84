"""The fused operators as `torch.library` knows them; their kernels are imported when called."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ripple_attention.ops.library import in_full_precision, refuse_second_derivatives
from ripple_attention.ops.triton_support import far_sums_like, late

MAX_WIDTH = 64  # of a head's channels and features, which the front keeps in registers


def _register(
    name: str, parameters: str, options: str, kept: str, fake: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Makes the operators `ripple_attention::{name}` and `…_backward` of functions of that name.

    Args:
        name: Of the operator; `ops.fused_triton` has its two passes.
        parameters: Names of the tensors that are learned.
        options: Types and names of what is not a tensor.
        kept: Names of the outputs, of which the first is the result.
        fake: qkv and parameters → outputs without values.
    """
    tensors = ["Tensor qkv", "Tensor? mask", *(f"Tensor {x}" for x in parameters.split())]
    outputs = [f"Tensor {x}" for x in kept.split()]
    inputs = ", ".join([*tensors, options])

    def result(count: int) -> str:
        return "(" + ", ".join(["Tensor"] * count) + ")"

    forward = torch.library.custom_op(
        f"ripple_attention::{name}",
        in_full_precision(late("fused_triton", f"{name}_forward")),
        mutates_args=(),
        schema=f"({inputs}) -> {result(len(outputs))}",
    )
    backward = torch.library.custom_op(
        f"ripple_attention::{name}_backward",
        in_full_precision(late("fused_triton", f"{name}_backward")),
        mutates_args=(),
        schema=f"(Tensor grad, {', '.join(outputs)}, {inputs}) -> {result(len(tensors) - 1)}",
    )

    @forward.register_fake
    def _(qkv: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        return fake(qkv, *rest)

    @backward.register_fake
    def _(*args: Any) -> Any:
        qkv, _, *learned = args[1 + len(outputs) :][: len(tensors)]
        return tuple(x.new_empty(x.shape) for x in (qkv, *learned))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output, *inputs[: len(tensors)])
        ctx.options = inputs[len(tensors) :]

    def differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_qkv, *grads = backward(grad, *ctx.saved_tensors, *ctx.options)
        return grad_qkv, None, *grads, *(None for _ in ctx.options)

    forward.register_autograd(differentiate, setup_context=setup_context)
    remedy = "use implementation='naive' of a ripple layer, or set fuse = False of a linear one"
    refuse_second_derivatives(backward, "a layer by fused kernels", remedy)

    def operator(*args: Any) -> Tensor:
        return forward(*args)[0]

    return operator


def _fake_linear(qkv: Tensor, w1: Tensor, w2: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    B, H, W, _, N, D = qkv.shape
    M = w2.shape[0]
    out, phi_q, phi_k = (qkv.new_empty(B, H, W, N, width) for width in (D, M, M))
    denominator, state = (
        qkv.new_empty(shape, dtype=torch.float32) for shape in ((B, H, W, N), (B, N, D + 1, M))
    )
    return out, denominator, phi_q, phi_k, state


def _fake_ripple(qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *first, _ = _fake_linear(qkv, *rest)
    groups, M = rest[5].shape[1] + 1, rest[1].shape[0]
    alpha = first[1].new_empty(*first[1].shape, groups)
    return *first, alpha, far_sums_like(qkv[:, :, :, 2], M, rest[6])


_fused_linear = _register(
    "fused_linear",
    "w1 w2 b2",
    "str scaling, float eps",
    "out denominator phi_q phi_k state",
    _fake_linear,
)
_fused_ripple = _register(
    "fused_ripple",
    "w1 w2 b2 proj_weight proj_bias embedding",
    "int[] radii, str scaling, bool balanced, float halt_threshold, float eps",
    "out denominator phi_q phi_k alpha cut",
    _fake_ripple,
)


def fused_linear_attention(
    qkv: Tensor, mask: Tensor | None, parameters: tuple[Tensor, ...], scaling: str, eps: float
) -> Tensor:
    """Linear attention with the `learned` map, by fused kernels. Arguments as below."""
    return _fused_linear(qkv, mask, *parameters, scaling, float(eps))


def fused_ripple_attention(
    qkv: Tensor,
    mask: Tensor | None,
    parameters: tuple[Tensor, ...],
    radii: tuple[int, ...],
    scaling: str,
    balanced: bool,
    halt_threshold: float,
    eps: float,
) -> Tensor:
    """Ripple attention with the `learned` map and stick-breaking weights, by fused kernels.

    What `RippleAttention` computes between its projections, without writing what lies between but
    φ(q), φ(k) and α.

    Args:
        qkv: (B, H, W, 3, N, D), float32, bfloat16 or float16; keys and values of padded tokens 0.
        mask: Bool (B, H, W), True for padded tokens.
        parameters: W₁, W₂, b₂ of the map, P, p and the embedding of the weights; float32.
        radii: Of the partition.
        scaling, balanced, halt_threshold, eps: As in the layer.

    Returns:
        (B, H, W, N, D), in the type of qkv.
    """
    return _fused_ripple(
        qkv, mask, *parameters, list(radii), scaling, balanced, float(halt_threshold), float(eps)
    )
