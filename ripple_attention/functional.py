"""The public operators: check what came, choose an algorithm, call it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ripple_attention import dispatch
from ripple_attention.checks import (
    LARGEST,
    REMEDY,
    check_floats,
    check_number,
    describe,
    holds_floats,
    is_dense,
    shorten,
)
from ripple_attention.dispatch import Problem
from ripple_attention.operands import (
    check_mask,
    check_operands,
    check_qkv,
    in_autocast_type,
    in_function_transform,
    is_exporting,
    is_transformed,
)
from ripple_attention.ops.common import (
    accumulation_dtype,
    drop_empty_groups,
    safe_divide,
    without_autocast,
    without_padding,
)
from ripple_attention.ops.export import ripple_export
from ripple_attention.ops.library import lazy_import, register
from ripple_attention.ops.naive import ripple_naive, ripple_softmax
from ripple_attention.ops.near import (
    Prefix,
    as_share,
    merge,
    prefix_by_features,
    prefix_by_softmax,
    register_window,
    window_backward,
    window_by_pairs,
    window_export,
    window_forward,
)
from ripple_attention.ops.table import table_backward, table_forward
from ripple_attention.ops.tile_sums import tile_sums_backward, tile_sums_forward
from ripple_attention.ops.tiled import tiled_backward, tiled_forward
from ripple_attention.ops.tiling import far_sums_like
from ripple_attention.partition import Partition


def _by_kernels(name: str, file: str, *more: Any, **options: Any) -> Callable[..., Tensor]:
    """An operator whose two passes stand in a file of `ops.kernels`."""
    passes = (lazy_import(file, f"{name}_{way}") for way in ("forward", "backward"))
    return register(name, *passes, *more, **options)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "naive": ripple_naive,
    "table": register("table", table_forward, table_backward),
    "tiled": register("tiled", tiled_forward, tiled_backward),
    "tile_sums": register("tile_sums", tile_sums_forward, tile_sums_backward),
    "tiled_triton": _by_kernels(
        "tiled_triton",
        "window",
        lazy_import("window", "tiled_triton_inference"),
        extra_output=far_sums_like,
    ),
    "tile_sums_triton": _by_kernels("tile_sums_triton", "tile_sums"),
    "table_triton": _by_kernels("table_triton", "boxes"),
    "naive_triton": _by_kernels("naive_triton", "pairs"),
}

WINDOWS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "pairs": window_by_pairs,
    "tiles": register_window("near_window", window_forward, window_backward),
    "kernels": register_window(
        "near_window_triton",
        lazy_import("near", "near_triton_forward"),
        lazy_import("near", "near_triton_backward"),
    ),
    "export": window_export,
}


class NearSoftmax(NamedTuple):
    """What `ripple_attention` needs to weigh near tokens by exp(q·k) in place of φ(q)·φ(k).

    Args:
        q: Queries (B, H, W, N, D), not mapped.
        k: Keys (B, H, W, N, D), not mapped.
        far_scale: log c (B, H, W, N), which puts features on the scale of the exponential.
        distance: Groups inside the box of this radius are near, one of the partition's radii; None
            for all groups but the rest.
        scale: Factor on q·k, D^(−1/2) unless given.
    """

    q: Tensor
    k: Tensor
    far_scale: Tensor
    distance: int | None = None
    scale: float | None = None


def ripple_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    *,
    partition: Partition,
    near: NearSoftmax | None = None,
    prefix_k: Tensor | None = None,
    prefix_v: Tensor | None = None,
    prefix_padding_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    implementation: str = "auto",
    eps: float = 0.0,
) -> Tensor:
    """Linear attention in which every query says how much each ring around it counts.

        out_i = φq_iᵀ Σ_g α_g(i) Σ_{j in group g of i} φk_j v_jᵀ
                ÷  (φq_iᵀ Σ_g α_g(i) Σ_{j in group g of i} φk_j + eps)

    Where the denominator is 0 the output is 0. Sums are float32, or float64 for float64 inputs.
    Under autocast q, k and v are taken in its type. Infinities, NaNs and sums that overflow give
    outputs and gradients that are not finite, never 0, by every implementation.

    Args:
        q: Queries after the feature map (B, H, W, N, M). Any strides.
        k: Keys after the feature map (B, H, W, N, M).
        v: Values (B, H, W, N, E).
        spatial_weights: α (B, H, W, N, G), in the type of v or float32.
        partition: Which tokens are a group, with G = `partition.num_groups`.
        near: Weighs near tokens by exp(q·k) and the others by features, on one scale: see
            `NearSoftmax`. `eps` is not used then.
        prefix_k: Keys (B, P, N, ·) of tokens that have no place on the grid; every query sees them.
            They come after the feature map, or before it with `near`. They are a group of their
            own, the first of G + 1 `spatial_weights`.
        prefix_v: Their values (B, P, N, E).
        prefix_padding_mask: Bool (B, P), True for padded ones.
        key_padding_mask: Bool (B, H, W), True for padded keys, which are then ignored.
        implementation: "naive" (all pairs), "table" (summed-area tables), "tiled" (near window and
            far sum), "tile_sums" (near window and sums that tiles share); the same as Triton
            kernels, "naive_triton", "table_triton", "tiled_triton" (a reach of at most 16) and
            "tile_sums_triton", on NVIDIA GPUs, not in float64; or "auto" for what
            `dispatch.choose` expects to be fastest. `explain` prints it.
        eps: Added to the denominator, at least 0.

    Returns:
        (B, H, W, N, E), in the type of v.

    >>> import torch
    >>> from ripple_attention import chebyshev, ripple_attention
    >>> q, k, v = torch.rand(3, 2, 14, 14, 6, 32).unbind(0)
    >>> weights = torch.full((2, 14, 14, 6, 5), 1 / 5)
    >>> ripple_attention(q, k, v, weights, partition=chebyshev(4)).shape
    torch.Size([2, 14, 14, 6, 32])
    """
    dispatch.check_implementation(implementation)
    eps = check_eps(eps)
    q, k, v = in_autocast_type(q, k, v)
    given = prefix_k, prefix_v, prefix_padding_mask
    if near is not None or any(x is not None for x in given):
        parts = q, k, v, spatial_weights, partition, near, given
        return _with_shares(*parts, key_padding_mask, implementation, eps)
    check_operands(q, k, v, spatial_weights, partition, key_padding_mask)
    if not is_exporting() and v.numel() == 0:
        return v + 0 * (q.sum() + k.sum() + spatial_weights.sum()).to(v.dtype)
    if key_padding_mask is not None:
        k, v = without_padding(k, v, key_padding_mask)
    if is_exporting():
        with without_autocast(v):
            return ripple_export(q, k, v, spatial_weights, partition.bounds, eps)
    problem = problem_of(q, k, v, spatial_weights, partition)
    name = dispatch.choose(problem, implementation)
    if name != "naive" or key_padding_mask is not None:
        spatial_weights = drop_empty_groups(spatial_weights, partition, key_padding_mask)
    with without_autocast(v):
        return OPERATORS[name](q, k, v, spatial_weights, partition.bounds, eps)


def _with_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    partition: Partition,
    near: NearSoftmax | None,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    mask: Tensor | None,
    implementation: str,
    eps: float,
) -> Tensor:
    """`ripple_attention` where near tokens weigh by softmax, or there are prefix tokens, or both.

    Features make one share of the mean; the window and the prefix tokens make another. `given` are
    keys, values and mask of prefix tokens.
    """
    some = any(x is not None for x in given)
    check_operands(q, k, v, spatial_weights, partition, mask, 1 if some else 0)
    first_far = 0
    if near is not None:
        near, first_far = _checked_near(near, v, partition)
    prefix = _checked_prefix(*given, q if near is None else near.q, v)
    if not is_exporting() and v.numel() == 0:
        return v + 0 * (q.sum() + k.sum() + spatial_weights.sum()).to(v.dtype)
    if mask is not None:
        k, v = without_padding(k, v, mask)
    with without_autocast(v):
        of_prefix = spatial_weights[..., :1]
        weights = spatial_weights if prefix is None else spatial_weights[..., 1:]
        of_window, all_radii = weights[..., :first_far], partition.radii
        if near is not None:
            # Near groups are one to the features, which weighs nothing.
            partition = replace(partition, radii=all_radii[first_far - 1 :])
            weights = torch.cat([torch.zeros_like(of_prefix), weights[..., first_far:]], -1)
        problem = problem_of(q, k, v, weights, partition, near)
        name = dispatch.choose(problem, "naive" if is_exporting() else implementation)
        if near is None:
            assert prefix is not None
            share = prefix_by_features(q, prefix, of_prefix)
        else:
            kind = dispatch.choose_window(problem, name, implementation)
            window = WINDOWS["export" if is_exporting() else kind]
            keys = near.k if mask is None else without_padding(near.k, v, mask)[0]
            scale = max(near.q.shape[-1], 1) ** -0.5 if near.scale is None else float(near.scale)
            seen = window(near.q, keys, v, of_window, mask, list(all_radii[:first_far]), scale)
            if prefix is not None:
                seen = merge(seen, prefix_by_softmax(near.q, prefix, of_prefix, scale))
            share, eps = as_share(*seen, near.far_scale), 0.0
        radii = partition.bounds
        if is_exporting():
            return ripple_export(q, k, v, weights, radii, eps, *share)
        if name != "naive" or mask is not None:
            weights = drop_empty_groups(weights, partition, mask)
        return OPERATORS[name].shared(q, k, v, weights, *share, radii, eps)  # type: ignore[attr-defined]


def _checked_near(near: NearSoftmax, v: Tensor, partition: Partition) -> tuple[NearSoftmax, int]:
    """Near queries and keys in the type of v, and which group is the first far one."""
    if not isinstance(near, NearSoftmax) or not holds_floats(near.far_scale):
        raise ValueError(
            "near must be a NearSoftmax of tensors q, k and far_scale; got "
            f"near={shorten(near)}. None weighs all tokens by features."
        )
    if near.scale is not None:
        check_number("near.scale", near.scale)
    q, k = in_autocast_type(near.q, near.k)
    distance = partition.reach if near.distance is None else near.distance
    check_qkv(q, k, v)
    c = near.far_scale
    if c.shape != v.shape[:-1] or c.device != v.device:
        raise ValueError(
            "near.far_scale must be log c (B, H, W, N), floats, with the batch, grid and heads of "
            f"v, on its device; got {describe(c)} beside v.{describe(v)}. Zeros leave both kernels "
            "as they are."
        )
    if isinstance(distance, bool) or distance not in partition.radii:
        raise ValueError(
            "near_distance, up to which tokens weigh by softmax, must be one of the partition's "
            f"radii {partition.radii}; got {distance}. None takes them all."
        )
    first_far = partition.radii.index(distance) + 1
    return near._replace(q=q, k=k, far_scale=near.far_scale.to(accumulation_dtype(v))), first_far


def _checked_prefix(
    k: Tensor | None, v: Tensor | None, mask: Tensor | None, queries: Tensor, values: Tensor
) -> Prefix | None:
    """Keys, values and mask of prefix tokens, or None where there are none.

    Args:
        queries: Of the grid, which meet the keys.
        values: Of the grid.
    """
    if k is None and v is None and mask is None:
        return None
    alike = holds_floats(k) and holds_floats(v) and k.dim() == v.dim() == 4  # type: ignore[union-attr]
    if k is None or v is None or not alike or k.shape[:-1] != v.shape[:-1] or k.shape[1] == 0:
        raise ValueError(
            "prefix_k and prefix_v come together, as floating-point tensors (B, P, N, channels) of "
            f"one batch, number P ≥ 1 and heads; got {describe(k)} and {describe(v)}. {REMEDY}"
        )
    k, v = in_autocast_type(k, v)
    for name, x, other in (("prefix_k", k, queries), ("prefix_v", v, values)):
        like = (other.shape[0], *other.shape[3:])
        if (x.shape[0], *x.shape[2:]) != like or (x.dtype, x.device) != (other.dtype, other.device):
            raise ValueError(
                f"{name} must have the batch, heads, width, type and device of the grid's; got "
                f"{describe(x)} beside {describe(other)}. Keys go with the queries that they "
                "meet, q or near.q, and values with v."
            )
    if mask is None:
        return Prefix(k, v, mask)
    if not is_dense(mask):
        raise ValueError(
            "prefix_padding_mask must be a bool tensor (B, P), a dense one; got "
            f"{describe(mask)}. {REMEDY}"
        )
    if mask.dtype != torch.bool or mask.shape != k.shape[:2] or mask.device != v.device:
        raise ValueError(
            f"prefix_padding_mask must be bool (B, P) = {tuple(k.shape[:2])} on {v.device}, True "
            f"for padded tokens; got {describe(mask)}. A 0/1 mask needs .bool()."
        )
    k, v = (x.masked_fill(mask[..., None, None], 0) for x in (k, v))
    return Prefix(k, v, mask)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    partition: Partition,
    near: NearSoftmax | None = None,
) -> Problem:
    """What the choice of a back end depends on, for the operator."""
    _, H, W, _, E = v.shape
    return Problem(
        (H, W),
        q.shape[-1],
        E,
        partition.radii,
        v.dtype,
        v.device.type,
        dispatch.kernels_can_run(v.device.type, v.device.index),
        head_dim=0 if near is None else near.q.shape[-1],
        transformed=is_transformed(q, k, v, spatial_weights, *(near or ())[:3]),
        near=None if near is None else partition.radii[0],
        shared=dispatch.shared_memory(v.device.type, v.device.index),
        tile_radii=partition.tile_radii,
        tile=partition.tile,
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    *,
    partition: Partition,
    near: NearSoftmax | None = None,
    prefix_k: Tensor | None = None,
    implementation: str = "auto",
) -> str:
    """Prints what `ripple_attention` would run for these inputs, and why nothing else.

    Returns:
        The name of the back end that runs.
    """
    dispatch.check_implementation(implementation)
    q, k, v = in_autocast_type(q, k, v)
    if prefix_k is not None:
        check_floats("prefix_k", prefix_k, "(B, P, N, channels)")
    check_operands(q, k, v, spatial_weights, partition, None, 0 if prefix_k is None else 1)
    if near is not None:
        near, first_far = _checked_near(near, v, partition)
        partition = replace(partition, radii=partition.radii[first_far - 1 :])
    problem = problem_of(q, k, v, spatial_weights, partition, near)
    return dispatch.explain(problem, implementation)


def check_eps(eps: float) -> float:
    """The number itself, if it may be added to a denominator."""
    number = isinstance(eps, int | float) and not isinstance(eps, bool)
    if not (number and 0 <= eps <= LARGEST):
        raise ValueError(
            "eps, which is added to the denominator, must be a finite number ≥ 0; "
            f"got eps={shorten(eps)}. 0 adds nothing."
        )
    return float(eps)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, key_padding_mask: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Linear attention, ripple attention's parent: every token weighs the same.

        out_i = φq_iᵀ Σ_j φk_j v_jᵀ  ÷  (φq_iᵀ Σ_j φk_j + eps)

    Args:
        q: Queries after the feature map (B, H, W, N, M).
        k: Keys after the feature map (B, H, W, N, M).
        v: Values (B, H, W, N, E).
        key_padding_mask: Bool (B, H, W), True for padded keys.
        eps: Added to the denominator, at least 0.

    Returns:
        (B, H, W, N, E), in the type of v; 0 where the denominator is 0. Sums are float32 or better.
    """
    eps = check_eps(eps)
    q, k, v = in_autocast_type(q, k, v)
    check_qkv(q, k, v)
    check_mask(key_padding_mask, v)
    if key_padding_mask is not None:
        k, v = without_padding(k, v, key_padding_mask)
    with without_autocast(v):
        queries, keys, values = (x.to(accumulation_dtype(v)) for x in (q, k, v))
        state = torch.einsum("bhwnm,bhwne->bnme", keys, values)
        numerator = torch.einsum("bhwnm,bnme->bhwne", queries, state)
        denominator = torch.einsum("bhwnm,bnm->bhwn", queries, keys.sum((1, 2)))
        return safe_divide(numerator, denominator.unsqueeze(-1) + eps).to(v.dtype)


def ripple_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spatial_weights: Tensor,
    *,
    partition: Partition,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention with the additive bias log α_g: ripples without a feature map.

    Quadratic in the number of tokens; a reference.

    Args:
        q: Queries (B, H, W, N, D), not mapped.
        k: Keys (B, H, W, N, D), not mapped.
        v: Values (B, H, W, N, E).
        spatial_weights: α (B, H, W, N, G) ≥ 0; a group of weight 0 is not seen. Negative weights
            are refused on a CPU. GPUs and compiled code do not check them, and give NaN.
        partition: Which tokens are a group.
        key_padding_mask: Bool (B, H, W), True for padded keys.
        scale: Factor on q·k, D^(−1/2) unless given.

    Returns:
        (B, H, W, N, E), in the type of v; 0 for a query that sees nothing.
    """
    q, k, v = in_autocast_type(q, k, v)
    check_operands(q, k, v, spatial_weights, partition, key_padding_mask)
    if key_padding_mask is not None:
        k, v = without_padding(k, v, key_padding_mask)
    if spatial_weights.device.type == "cpu":
        _refuse_negative(spatial_weights)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else check_number("scale", scale)
    if v.numel() == 0:
        return v + 0 * (q.sum() + k.sum() + spatial_weights.sum()).to(v.dtype)
    bounds = partition.bounds
    with without_autocast(v):
        return ripple_softmax(q, k, v, spatial_weights, bounds, key_padding_mask, scale)


def _refuse_negative(spatial_weights: Tensor) -> None:
    if type(spatial_weights) not in (Tensor, torch.nn.Parameter) or in_function_transform():
        return  # traced, or one of many
    if not torch.compiler.is_compiling() and (spatial_weights < 0).any():
        raise ValueError(
            "spatial_weights must be ≥ 0, as their logarithm is added to the scores; got "
            f"{float(spatial_weights.min())=}. Take logits through softmax or stick_breaking."
        )
