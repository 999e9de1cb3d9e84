"""The fused operators as `torch.library` knows them; their kernels are imported when called."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ripple_attention.fusion import FeatureSpec, WeightSpec
from ripple_attention.ops.library import Operator, lazy_import
from ripple_attention.ops.tiling import far_sums_like

MAP = "Tensor? w1, Tensor? matrix, Tensor? bias"
OF_MAP = "str activation, str scaling"
OF_WEIGHTS = "bool sticks, bool balanced, bool truncated, float halt_threshold"


def _register(
    name: str,
    inputs: str,
    options: str,
    outputs: str,
    fake: Callable[..., Any],
    *,
    results: int = 1,
    keep: bool = True,
) -> Callable[..., Any]:
    """Makes the operators `ripple_attention::{name}` and `…_backward` of functions of that name.

    Args:
        name: Of the operator; `kernels.layer` has its two passes.
        inputs: Types and names of the tensors.
        options: Types and names of what is not a tensor.
        outputs: Names of the outputs.
        fake: Inputs and options → outputs without values.
        results: How many of the outputs, the first ones, have gradients.
        keep: Whether the backward pass gets the outputs, too.
    """
    names, tensors = outputs.split(), inputs.count("Tensor")
    kept = [f"Tensor {x}" for x in names] if keep else []

    def result(count: int) -> str:
        return "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"

    forward = Operator(
        name,
        f"({inputs}, {options}) -> {result(len(names))}",
        lazy_import("layer", f"{name}_forward"),
        fake,
    )
    # A gradient that nobody can ask for is an empty tensor: operators have no optional outputs.
    has_mask = "Tensor? mask" in inputs
    with_gradient = tensors - has_mask
    run_backward = lazy_import("layer", f"{name}_backward")

    def run(*args: Any) -> tuple[Tensor, ...]:
        return tuple(args[0].new_empty(0) if x is None else x for x in run_backward(*args))

    def fake_gradients(*args: Any) -> Any:
        given = args[results + len(kept) :][:tensors]
        like = [x for i, x in enumerate(given) if not (has_mask and i == 1)]
        return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in like)

    upstream = [f"Tensor grad_{x}" for x in names[:results]]
    backward = Operator(
        f"{name}_backward",
        f"({', '.join([*upstream, *kept, inputs, options])}) -> {result(with_gradient)}",
        run,
        fake_gradients,
    )

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else output
        ctx.save_for_backward(*(outputs if keep else ()), *inputs[:tensors])
        ctx.options = inputs[tensors:]

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints unpack them no second time
        given = saved[len(kept) :]
        gradients = list(backward(*grads[:results], *saved, *ctx.options))
        if has_mask:
            gradients.insert(1, None)
        found = (None if x is None else g for x, g in zip(given, gradients, strict=True))
        return *found, *(None for _ in ctx.options)

    forward.register_autograd(differentiate, setup_context, results)
    remedy = "use implementation='naive' of a ripple layer, or set fuse = False of a linear one"
    backward.refuse_derivatives("a layer by fused kernels", remedy)
    return forward


def _fake_linear(
    qkv: Tensor, mask: Tensor | None, w1: Tensor | None, matrix: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    B, H, W, _three, N, D = qkv.shape
    M = D if matrix is None else matrix.shape[-2]
    out, phi_q, phi_k = (qkv.new_empty(B, H, W, N, width) for width in (D, M, M))
    denominator = qkv.new_empty(B, H, W, N, dtype=torch.float32)
    state = qkv.new_empty(B, N, D + 1, M, dtype=torch.float32)
    return out, denominator, phi_q, phi_k, state


def _fake_ripple(qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *first, _ = _fake_linear(qkv, *rest)
    given, radii = rest[7:9]
    tokens, M = first[1].shape, first[2].shape[-1]
    made = (*tokens, len(radii) + 1) if given is None else (0,)
    return *first, first[1].new_empty(made), far_sums_like(qkv[:, :, :, 2], M, radii)


def _fake_features(q: Tensor, k: Tensor, w1: Any, matrix: Tensor | None, *_: Any) -> Any:
    M = q.shape[-1] if matrix is None else matrix.shape[-2]
    return q.new_empty(*q.shape[:-1], M), k.new_empty(*k.shape[:-1], M)


def _fake_weights(v: Tensor, weight: Tensor, bias: Tensor, e: Tensor, groups: int, *_: Any) -> Any:
    return v.new_empty(*v.shape[:-1], groups, dtype=torch.float32)


_linear = _register(
    "fused_linear",
    f"Tensor qkv, Tensor? mask, {MAP}",
    f"{OF_MAP}, float eps",
    "out denominator phi_q phi_k state",
    _fake_linear,
)
_ripple = _register(
    "fused_ripple",
    f"Tensor qkv, Tensor? mask, {MAP}, Tensor? proj_weight, Tensor? proj_bias, Tensor? embedding, "
    "Tensor? alpha",
    f"int[] radii, {OF_MAP}, {OF_WEIGHTS}, float eps",
    "out denominator phi_q phi_k made far",
    _fake_ripple,
)
_features = _register(
    "fused_features", f"Tensor q, Tensor k, {MAP}", OF_MAP, "phi_q phi_k", _fake_features, results=2
)
_weights = _register(
    "fused_weights",
    "Tensor v, Tensor proj_weight, Tensor proj_bias, Tensor embedding",
    f"int groups, {OF_WEIGHTS}",
    "alpha",
    _fake_weights,
    keep=False,
)


def fused_linear_attention(
    qkv: Tensor, mask: Tensor | None, features: FeatureSpec, eps: float
) -> Tensor:
    """Linear attention from the qkv projection on. Arguments as below."""
    return _linear(
        qkv, mask, *features.parameters, features.activation, features.scaling, float(eps)
    )[0]


def fused_ripple_attention(
    qkv: Tensor,
    mask: Tensor | None,
    features: FeatureSpec,
    weights: WeightSpec | Tensor,
    radii: Sequence[int],
    eps: float,
) -> Tensor:
    """Ripple attention from the qkv projection on.

    What `RippleAttention` computes between its projections, without writing what lies between but
    φ(q), φ(k) and α.

    Args:
        qkv: (B, H, W, 3, N, D), float32, bfloat16 or float16; keys and values of padded tokens 0.
        mask: Bool (B, H, W), True for padded tokens.
        features: Of the feature map.
        weights: How α is made of the values; or α itself, (B, H, W, N, G) of any strides, 0 for
            empty groups.
        radii: Of the partition.
        eps: Added to the denominator, at least 0.

    Returns:
        (B, H, W, N, D), in the type of qkv.
    """
    made = isinstance(weights, WeightSpec)
    tensors: tuple[Any, ...] = (*weights[:3], None) if made else (None, None, None, weights)
    options = weights[3:] if made else (False, False, False, 0.0)
    of_map = features.activation, features.scaling
    tensors = (*features.parameters, *tensors)
    return _ripple(qkv, mask, *tensors, list(radii), *of_map, *options, float(eps))[0]


def fused_features(q: Tensor, k: Tensor, features: FeatureSpec) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) of queries and keys (B, H, W, N, D)."""
    return _features(q, k, *features.parameters, features.activation, features.scaling)


def fused_weights(v: Tensor, weights: WeightSpec, groups: int) -> Tensor:
    """α (B, H, W, N, G) of values (B, H, W, N, D), in float32."""
    return _weights(v, *weights[:3], groups, *weights[3:])
