"""The front of a ripple-attention layer as Triton kernels, and its gradient.

From q, k and v, as they lie in one qkv projection, to what the attention itself takes:

    φ(x) = ReLU(W₂ [sin(W₁x̂); cos(W₁x̂)] + b₂),    x̂ = x as `FeatureMap.scale` leaves it
    α    = the stick of `stick_breaking`, halted as by `halt`, with o_g = ⟨P v + p, e_g⟩

and, where a sum over the image follows, shares of Σ φ(k)vᵀ. One kernel does it, in three roles: a
program maps queries, or maps keys and sums, or breaks sticks. (A program that does all three at
once holds twice the registers, and half as many run at a time. As more than four sticks want that
many for themselves, they are a launch of their own.) Every program loads a block of tokens while it
computes the one before. Only results are written. Two turns make it cheap:
- The length of x is a factor on its angles, W₁x̂ = scale·W₁x: products take x, which is exact.
- o_g = ⟨v, Pᵀe_g⟩ + ⟨p, e_g⟩: one vector for each head and stick, and P costs no token anything.
  In backward, the sums Σ ∂o_g v and Σ ∂o_g give the gradients of P, p and e.

Precision. All is float32 but for the operands of matrix products, which for half-precision inputs
are cut into parts that tensor cores take: bfloat16 parts for bfloat16 inputs; for float16, whose
exponents would be too few, tf32 parts, with as many bits. How many parts:

| product | operands | why |
|---|---|---|
| angles W₁x̂ | x exact; W₁ in two, or three (tf32: two) where nothing bounds x̂ | sines amplify |
| W₂[sin; cos], back, and ∂W₂ | one and one | what `fc` does under autocast |
| y = W₁ᵀt; ∂W₁ = Σ t xᵀ | t in one, W₁ in two; x exact | PyTorch rounds the sines' gradient, too |
| Σ ∂o vᵀ | ∂o in two, v exact | it is small |

Products of float32 inputs follow `PRECISIONS`. Logits and sticks use no tensor cores.
This module imports triton: import it where it is used.
"""

# Tuples of tensors grow by +, the only way that Triton reads; kernels have no types of Python's.
# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, assignment"

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ripple_attention.feature_maps import Scaling
from ripple_attention.ops.front_parts import (
    _break_stick,
    _features,
    _load,
    _load_block,
    _load_map,
    _multiply,
    _parts,
    _rounded,
    _rows,
    _stick_vectors,
    _store,
    _store_matrix,
    _tokens,
)
from ripple_attention.ops.kernel_parts import (
    _add_sums,
    _chunk,
    _dense_channels,
    _padded,
    _parts_of,
    _power_of_two,
)
from ripple_attention.ops.launch import INTERPRETED, launch, multiprocessors, overlapping, overlaps

# Kernels. Letters are those of `front_parts`. A program takes a chunk of the tokens of one head,
# BLOCKS times TOKENS of them. Long lists of arguments stand by kind.
# fmt: off


@triton.jit
def _map_chunk(
    x, v, mask, w1, w2, b2, phi, partial, x_strides, v_strides, mask_strides, phi_strides,
    b, n, chunk, L, chunks, factor, N: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr, PADDED_M: tl.constexpr,
    UNIT: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    SUMS: tl.constexpr, ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """φ(x) of a chunk of one head, zero where MASKED says so; and where SUMS its share of
    Σ [v, 1] φ(x)ᵀ, (D+1, M)."""
    dtype: tl.constexpr = x.dtype.element_ty
    maps, bias = _load_map(w1, w2, b2, D, M, PADDED_D, PADDED_M, dtype, ANGLE_PARTS)
    total = tl.zeros((PADDED_D, PADDED_M), tl.float32)
    ones_total = tl.zeros((16, PADDED_M), tl.float32)  # 16 times the same: faster than shuffles
    upcoming = _load_block(x, x_strides, chunk, 0, b, n, L, mask, mask_strides, D, PADDED_D,
                           MASKED, TOKENS, BLOCKS)
    for block in tl.range(BLOCKS, num_stages=1):  # as in `far_triton.state_kernel`
        token = upcoming
        upcoming = _load_block(x, x_strides, chunk, block + 1, b, n, L, mask, mask_strides, D,
                               PADDED_D, MASKED, TOKENS, BLOCKS)
        at, inside, present = _tokens(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
        z = _features(token, maps, bias, factor, D, UNIT, dtype, PRECISION, HARDWARE)[0]
        features = tl.maximum(z, 0.0)
        if MASKED or SUMS:
            features = tl.where(present[:, None], features, 0.0)
        _store(phi, phi_strides, at, inside, features, M, PADDED_M)
        if SUMS:
            features = features.to(dtype)  # as they are stored
            value = tl.trans(_load(v, v_strides, at, present, D, PADDED_D))
            one = tl.full((16, TOKENS), 1.0, tl.float32).to(dtype)
            if dtype == tl.float32:
                total = _add_sums(value, features, total)
                ones_total = _add_sums(one, features, ones_total)
            else:
                total = tl.dot(value, features, total)
                ones_total = tl.dot(one, features, ones_total)
    if SUMS:
        start = partial + ((b * N + n) * chunks + chunk) * ((D + 1) * M)
        _store_matrix(start, M, total, D, M)
        _store_matrix(start + D * M, M, ones_total, 1, M)


@triton.jit
def _stick_chunk(
    v, mask, proj_w, proj_b, embedding, alpha, v_strides, mask_strides, alpha_strides,
    b, n, chunk, L, threshold, D: tl.constexpr, PADDED_D: tl.constexpr, PADDED_G: tl.constexpr,
    OFFSETS: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """α of a chunk of one head."""
    groups: tl.constexpr = len(OFFSETS) + 1
    vectors, constants = _stick_vectors(embedding, proj_w, proj_b, n, D, PADDED_D, groups - 1)
    group = tl.arange(0, PADDED_G)
    upcoming = _load_block(v, v_strides, chunk, 0, b, n, L, mask, mask_strides, D, PADDED_D,
                           MASKED, TOKENS, BLOCKS)
    for block in range(BLOCKS):
        value = upcoming.to(tl.float32)
        upcoming = _load_block(v, v_strides, chunk, block + 1, b, n, L, mask, mask_strides, D,
                               PADDED_D, MASKED, TOKENS, BLOCKS)
        _, _, weights, merged, share, _ = _break_stick(
            value, vectors, constants, threshold, OFFSETS, HARDWARE)
        # One store of whole rows: one for each group would touch the same sectors G times.
        rows = tl.zeros((TOKENS, PADDED_G), tl.float32)
        for g in tl.static_range(groups):
            weight = tl.where(merged[g], share, weights[g])
            rows = tl.where((group == g)[None, :], weight[:, None], rows)
        at, inside, _ = _tokens(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, False, TOKENS)
        _store(alpha, alpha_strides, at, inside, rows, groups, PADDED_G)


@triton.jit
def front_kernel(
    first, q, k, v, mask, w1, w2, b2, proj_w, proj_b, embedding, phi_q, phi_k, alpha, partial,
    q_strides, k_strides, v_strides, mask_strides, phi_strides, alpha_strides,
    L, chunks, factor, threshold, N: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_G: tl.constexpr, UNIT: tl.constexpr, OFFSETS: tl.constexpr, MASKED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, MAPS: tl.constexpr, SUMS: tl.constexpr,
    ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """For a chunk of one head, by the program's role: φ(q); or φ(k), and where SUMS its share of
    Σ [v, 1] φ(k)ᵀ; or α, alone unless MAPS. Roles of a chunk run together, as q, k and v lie."""
    b, n, chunk = _chunk(first, N)
    role = tl.program_id(0) // N if MAPS else 2
    if role == 0:
        _map_chunk(
            q, v, mask, w1, w2, b2, phi_q, partial, q_strides, v_strides, mask_strides, phi_strides,
            b, n, chunk, L, chunks, factor, N, D, M, PADDED_D, PADDED_M, UNIT, False, TOKENS,
            BLOCKS, False, ANGLE_PARTS, PRECISION, HARDWARE)
    elif role == 1:
        _map_chunk(
            k, v, mask, w1, w2, b2, phi_k, partial, k_strides, v_strides, mask_strides, phi_strides,
            b, n, chunk, L, chunks, factor, N, D, M, PADDED_D, PADDED_M, UNIT, MASKED, TOKENS,
            BLOCKS, SUMS, ANGLE_PARTS, PRECISION, HARDWARE)
    else:
        if len(OFFSETS) > 0:  # else there is no such role
            _stick_chunk(
                v, mask, proj_w, proj_b, embedding, alpha, v_strides, mask_strides, alpha_strides,
                b, n, chunk, L, threshold, D, PADDED_D, PADDED_G, OFFSETS, MASKED, TOKENS, BLOCKS,
                HARDWARE)


@triton.jit
def _feature_gradient(
    x, upstream, totals, maps, bias, factor, D: tl.constexpr, UNIT: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """∂x from ∂φ(x), and the sums ∂W₁, ∂W₂ (its two halves) and ∂b₂ (16 times) with these tokens.

    With z = W₂[sin; cos] + b₂, ∂z = [z > 0]·∂φ and [∂sin; ∂cos] = W₂ᵀ∂z:
    t = scale·(∂sin·cos − ∂cos·sin),  ∂W₁ = Σ t xᵀ,  y = W₁ᵀt,  ∂x = y − x ⟨y, x⟩/(D·mean square).
    """
    z, sines, taken, scale, inverse = _features(
        x, maps, bias, factor, D, UNIT, DTYPE, PRECISION, HARDWARE)
    upstream = _rounded(tl.where(z > 0, upstream.to(tl.float32), 0.0), DTYPE)  # ∂z
    flipped = tl.trans(upstream)
    w1_total, sine_total, cosine_total, bias_total = totals
    sine_total = tl.dot(flipped, taken[0], sine_total, input_precision=PRECISION)
    cosine_total = tl.dot(flipped, taken[1], cosine_total, input_precision=PRECISION)
    ones = _rounded(tl.full((16, x.shape[0]), 1.0, tl.float32), DTYPE)  # faster than shuffles
    bias_total = tl.dot(ones, upstream, bias_total, input_precision=PRECISION)
    gradient = _multiply(upstream, maps[1], 1, True, PRECISION) * sines[1]
    gradient -= _multiply(upstream, maps[2], 1, True, PRECISION) * sines[0]
    gradient = _rounded(gradient * scale[:, None], DTYPE)  # t
    w1_total = tl.dot(tl.trans(gradient), _rounded(x, DTYPE), w1_total, input_precision=PRECISION)
    gradient = _multiply(gradient, maps[0], 2, True, PRECISION)  # y
    if UNIT:
        wide = x.to(tl.float32)
        along = tl.sum(gradient * wide, 1) * inverse / D
        gradient -= wide * along[:, None]
    return gradient, (w1_total, sine_total, cosine_total, bias_total)


@triton.jit
def map_gradient_kernel(
    first, grad_phi, x, mask, w1, w2, b2, grad_x, partial,
    grad_phi_strides, x_strides, mask_strides, grad_x_strides,
    L, chunks, factor, N: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr, PADDED_M: tl.constexpr,
    UNIT: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
    OVERLAP: tl.constexpr, KEYS: tl.constexpr,
):
    """∂x of a chunk of one head, and its share of the map's gradients, a row of ∂W₁ (D·D),
    ∂W₂ (M·2D) and ∂b₂ (M)."""
    if OVERLAP:
        gdc_launch_dependents()
    dtype: tl.constexpr = x.dtype.element_ty
    b, n, chunk = _chunk(first, N)
    maps, bias = _load_map(w1, w2, b2, D, M, PADDED_D, PADDED_M, dtype, ANGLE_PARTS)
    half = tl.zeros((PADDED_M, PADDED_D), tl.float32)
    totals = (tl.zeros((PADDED_D, PADDED_D), tl.float32), half, half,
              tl.zeros((16, PADDED_M), tl.float32))
    for block in range(BLOCKS):
        at, inside, present = _tokens(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
        there = present if KEYS else inside
        upstream = _load(grad_phi, grad_phi_strides, at, there, M, PADDED_M)
        token = _load(x, x_strides, at, there, D, PADDED_D)
        gradient, totals = _feature_gradient(
            token, upstream, totals, maps, bias, factor, D, UNIT, dtype, PRECISION, HARDWARE)
        _store(grad_x, grad_x_strides, at, inside, gradient, D, PADDED_D)
    start = partial + ((b * chunks + chunk) * N + n) * (D * D + 2 * D * M + M)
    _store_matrix(start, D, totals[0], D, D)
    _store_matrix(start + D * D, 2 * D, totals[1], M, D)
    _store_matrix(start + D * D + D, 2 * D, totals[2], M, D)
    _store_matrix(start + D * D + 2 * D * M, M, totals[3], 1, M)
    if OVERLAP:
        gdc_wait()


@triton.jit
def stick_gradient_kernel(
    first, grad_alpha, grad_value, v, mask, proj_w, proj_b, embedding, grad_v, partial,
    grad_alpha_strides, grad_value_strides, v_strides, mask_strides, grad_v_strides,
    L, chunks, threshold, N: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_G: tl.constexpr, OFFSETS: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """∂v of a chunk of one head, and its share of a row of Σ ∂o_g v ((G−1)·D) and Σ ∂o_g (G−1).

    With h_g = ∂α_g, averaged over merged groups, and t_g = α_g h_g of the stick before halting:
    ∂o_g = (1−s_g) t_g − s_g Σ_{g'>g} t_g',  ∂v += Σ_g ∂o_g Pᵀe_g.
    """
    if OVERLAP:
        gdc_launch_dependents()
    dtype: tl.constexpr = v.dtype.element_ty
    groups: tl.constexpr = len(OFFSETS) + 1
    b, n, chunk = _chunk(first, N)
    vectors, constants = _stick_vectors(embedding, proj_w, proj_b, n, D, PADDED_D, groups - 1)
    group = tl.arange(0, PADDED_G)
    vector_total = tl.zeros((PADDED_G, PADDED_D), tl.float32)
    constant_total = tl.zeros((TOKENS, PADDED_G), tl.float32)  # summed once, at the end
    for block in range(BLOCKS):
        at, inside, present = _tokens(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
        gradient = _load(grad_value, grad_value_strides, at, present, D, PADDED_D).to(tl.float32)
        value = _load(v, v_strides, at, present, D, PADDED_D)
        sticks, others, weights, merged, _, inverse = _break_stick(
            value.to(tl.float32), vectors, constants, threshold, OFFSETS, HARDWARE)
        upstreams = ()
        mean = tl.zeros_like(inverse)
        for g in tl.static_range(groups):
            pointers = _rows(grad_alpha, grad_alpha_strides, at) + g * grad_alpha_strides[4]
            upstream = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            upstreams = upstreams + (upstream,)
            mean += tl.where(merged[g], upstreams[g], 0.0)
        mean *= inverse
        later = weights[groups - 1] * tl.where(merged[groups - 1], mean, upstreams[groups - 1])
        columns = tl.zeros((TOKENS, PADDED_G), tl.float32)  # ∂o
        for g in tl.static_range(groups - 2, -1, -1):
            here = weights[g] * tl.where(merged[g], mean, upstreams[g])
            logit = others[g] * here - sticks[g] * later
            later += here
            gradient += logit[:, None] * vectors[g][None, :]
            columns = tl.where((group == g)[None, :], logit[:, None], columns)
        constant_total += columns
        parts, exact = _parts(tl.trans(columns), dtype, 2), _rounded(value, dtype)
        for i in tl.static_range(len(parts) - 1, -1, -1):
            vector_total = tl.dot(parts[i], exact, vector_total, input_precision=PRECISION)
        gradient = tl.where(present[:, None], gradient, 0.0)
        _store(grad_v, grad_v_strides, at, inside, gradient, D, PADDED_D)
    start = partial + ((b * chunks + chunk) * N + n) * ((groups - 1) * (D + 1))
    _store_matrix(start, D, vector_total, groups - 1, D)
    start += (groups - 1) * D
    tl.store(start + group, tl.sum(constant_total, 0), mask=group < groups - 1)
    if OVERLAP:
        gdc_wait()


# Launchers


class FrontParameters(NamedTuple):
    """The parameters of a `Learned` map and of `SpatialWeights`, float32.

    Without an embedding there are no spatial weights: the front of plain linear attention.
    """

    w1: Tensor  # W₁ (D, D)
    w2: Tensor  # W₂ (M, 2D), for sines then cosines
    b2: Tensor  # b₂ (M,)
    proj_weight: Tensor | None = None  # P (D, D)
    proj_bias: Tensor | None = None  # p (D,)
    embedding: Tensor | None = None  # e (N, G−1, D)

    @property
    def sticks(self) -> int:
        return 0 if self.embedding is None else self.embedding.shape[1]  # G−1


class FrontOptions(NamedTuple):
    """What is not learned."""

    scaling: Scaling = "unit"  # as in `FeatureMap`
    balanced: bool = True  # as in `stick_breaking`
    halt_threshold: float = 0.001  # τ of `halt`, whose tail is "share"


def front_forward(
    q: Tensor, k: Tensor, v: Tensor, parameters: FrontParameters, options: FrontOptions,
    mask: Tensor | None = None, sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Features of queries and keys, spatial weights, and sums over chunks of tokens.

    Args:
        q, k, v: Queries, keys and values (B, H, W, N, D), before the feature map. Of any strides:
            they are read in place where the channels of a head lie next to each other.
        parameters, options: Of the feature map and the weights.
        mask: Bool (B, H, W), True for padded tokens: their k and v count as 0, whatever stands
            there, and their φ(k) is 0. (v itself stays as it is: a NaN in it is the caller's.)
        sums: Whether sums are asked for.

    Returns:
        φ(q) and φ(k), (B, H, W, N, M), in the type of q; α (B, H, W, N, G) in float32, or None; the
        shares of chunks in Σ_j [v_j, 1] φ(k_j)ᵀ, (B, N, chunks, D+1, M) in float32, or None.
        Results repeat bit for bit.
    """
    q, k, v = (_flat(x) for x in (q, k, v))
    parameters, mask = _checked(q, k, v, parameters, mask)
    tokens, M, groups = v.shape[:-1], parameters.w2.shape[0], parameters.sticks + 1
    if not sums:
        q, k, v, mask = _as_one_image(q, k, v, mask)
    B, H, W, N, D = v.shape
    together = groups - 1 <= STICKS_TOGETHER
    roles = 3 if groups > 1 and together else 2
    plan = _choose("front", v, M, roles)
    phi_q, phi_k = (v.new_empty(B, H, W, N, M) for _ in range(2))
    alpha = v.new_empty(B, H, W, N, groups, dtype=torch.float32) if groups > 1 else None
    partial = v.new_empty(B, N, plan.chunks, D + 1, M, dtype=torch.float32) if sums else None

    def start(plan: Plan, roles: int, groups: int, sums: bool) -> None:
        launch(
            front_kernel, (roles * N, plan.chunks, B),
            q, k, v, mask, *parameters, phi_q, phi_k, alpha, partial,
            q.stride(), k.stride(), v.stride(), _strides(mask), phi_q.stride(), _strides(alpha),
            H * W, plan.chunks,
            *_front_arguments(plan, v, M, groups, options, mask, roles > 1, sums), **plan.launch)

    if v.numel():
        with torch.cuda.device_of(v):
            start(plan, roles, groups if together else 1, sums)
            if not together:
                start(_choose("sticks", v, M), 1, groups, False)
    alpha = None if alpha is None else alpha.view(*tokens, groups)
    return phi_q.view(*tokens, M), phi_k.view(*tokens, M), alpha, partial


def front_backward(
    grad_phi_q: Tensor, grad_phi_k: Tensor, grad_alpha: Tensor | None, grad_v: Tensor,
    q: Tensor, k: Tensor, v: Tensor, parameters: FrontParameters, options: FrontOptions,
    mask: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, FrontParameters]:
    """Gradients of `front_forward`, which keeps nothing for it: all is computed anew.

    Args:
        grad_phi_q, grad_phi_k: ∂φ(q) and ∂φ(k), (B, H, W, N, M).
        grad_alpha: ∂α (B, H, W, N, G); None where there are no weights.
        grad_v: ∂v (B, H, W, N, D) from all but α, which is added; it may be out[:, :, :, 2].
        q, k, v, parameters, options, mask: As in `front_forward`.
        out: (B, H, W, 3, N, D), channels next to each other, where ∂q, ∂k and ∂v are written, so
            that the gradient of the qkv projection needs no concatenation. Made unless given.

    Returns:
        ∂q, ∂k, ∂v, which are out[:, :, :, 0], 1 and 2, zero for padded keys and values; and the
        gradients of the parameters, float32. Results repeat bit for bit.
    """
    q, k, v = (_flat(x) for x in (q, k, v))
    grad_phi_q, grad_phi_k, grad_v = (_flat(x) for x in (grad_phi_q, grad_phi_k, grad_v))
    grad_alpha = None if grad_alpha is None else _flat(grad_alpha)
    parameters, mask = _checked(q, k, v, parameters, mask)
    M, sticks = parameters.w2.shape[0], parameters.sticks
    out = v.new_empty(*v.shape[:3], 3, *v.shape[3:]) if out is None else out
    results = out.unbind(3)
    q, k, v, mask, grad_phi_q, grad_phi_k, grad_alpha, grad_v, out = _as_one_image(
        q, k, v, mask, grad_phi_q, grad_phi_k, grad_alpha, grad_v, out)
    grads = out.unbind(3)
    B, H, W, N, D = v.shape
    maps, sticks_plan = _choose("map gradient", v, M), _choose("stick gradient", v, M)
    widths, stick_widths = [D * D, 2 * D * M, M], [sticks * D, sticks]
    make = v.new_empty if v.numel() else v.new_zeros
    partial = make(2, B * maps.chunks * N, sum(widths), dtype=torch.float32)
    of_sticks = make(B * sticks_plan.chunks, N, sum(stick_widths), dtype=torch.float32)
    with torch.cuda.device_of(v):
        if v.numel():
            for i, (x, grad) in enumerate(((q, grad_phi_q), (k, grad_phi_k))):
                launch(
                    map_gradient_kernel, (N, maps.chunks, B),
                    grad, x, mask, *parameters[:3], grads[i], partial[i],
                    grad.stride(), x.stride(), _strides(mask), grads[i].stride(),
                    H * W, maps.chunks, *_map_arguments(maps, v, M, options, mask), i == 1,
                    **maps.launch, **(overlapping() if i else {}))
        if grad_alpha is None:
            grads[2].copy_(grad_v if mask is None else grad_v.masked_fill(mask[..., None, None], 0))
        elif v.numel():
            launch(
                stick_gradient_kernel, (N, sticks_plan.chunks, B),
                grad_alpha, grad_v, v, mask, *parameters[3:], grads[2], of_sticks,
                grad_alpha.stride(), grad_v.stride(), v.stride(), _strides(mask),
                grads[2].stride(), H * W, sticks_plan.chunks,
                *_stick_arguments(sticks_plan, v, sticks + 1, options, mask),
                **sticks_plan.launch, **overlapping())
        of_maps = [x.sum((0, 1)) for x in partial.split(widths, 2)]
        grad_parameters = _parameter_gradients(
            of_maps, of_sticks.sum(0).split(stick_widths, 1), parameters)
    return results[0], results[1], results[2], grad_parameters
# fmt: on


def _parameter_gradients(
    of_maps: list[Tensor], of_sticks: tuple[Tensor, ...], parameters: FrontParameters
) -> FrontParameters:
    """From what the kernels sum: of the map, and, for each head, of the sticks."""
    w1, w2, b2 = (x.view_as(like) for x, like in zip(of_maps, parameters[:3], strict=True))
    weight, bias, embedding = parameters[3:]
    if weight is None or bias is None or embedding is None:
        return FrontParameters(w1, w2, b2)
    vectors, constants = of_sticks[0].view_as(embedding), of_sticks[1]  # Σ ∂o_g v; Σ ∂o_g
    sticks = embedding.flatten(0, 1).mT  # (D, N·(G−1))
    return FrontParameters(
        w1, w2, b2,
        sticks @ vectors.flatten(0, 1),
        sticks @ constants.flatten(),
        vectors @ weight.mT + constants[..., None] * bias,
    )  # fmt: skip


def _checked(
    q: Tensor, k: Tensor, v: Tensor, parameters: FrontParameters, mask: Tensor | None
) -> tuple[FrontParameters, Tensor | None]:
    """The parameters and the mask as the kernels read them, once all shapes are seen to fit."""
    D, M = v.shape[-1], parameters.w2.shape[0]
    if max(D, M) > MAX_WIDTH:
        raise ValueError(f"the fused front takes widths up to {MAX_WIDTH}; got {D=} and {M=}")
    assert q.shape == k.shape == v.shape and q.dtype == k.dtype == v.dtype
    assert parameters.w1.shape == (D, D) and parameters.w2.shape[1] == 2 * D
    assert mask is None or (mask.shape == v.shape[:3] and mask.dtype == torch.bool)
    tensors: Any = (None if x is None else x.float().contiguous() for x in parameters)
    return FrontParameters(*tensors), None if mask is None else _in_rows(mask)


def _flat(x: Tensor) -> Tensor:
    """x (B, H, W, …) with channels next to each other, rows following each other as columns do."""
    flat = x.shape[1] == 1 or x.stride(1) == x.shape[2] * x.stride(2)
    return _dense_channels(x) if flat else _in_rows(x)


def _in_rows(x: Tensor) -> Tensor:
    """A contiguous x with the strides that one has: of a single row or column they may be any."""
    return x.contiguous().view(-1).view(x.shape)


def _as_one_image(*tensors: Any) -> Any:
    """Tensors (B, H, W, …) with all images below each other, (1, B·H, W, …), if all of them lie so.

    An image's tokens rarely fill whole blocks; all images' do.
    """
    B, H, W = tensors[0].shape[:3]
    apart = any(x is not None and x.stride(0) != H * W * x.stride(2) for x in tensors)
    # A single column's stride is anything; chunks are numbered by 16 bits.
    if B == 1 or W == 1 or apart or B * H * W > 2**24:
        return tensors
    return tuple(None if x is None else x.flatten(0, 1)[None] for x in tensors)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0,) if x is None else (*x.stride(), 0)  # a mask has no heads


# Choices

PRECISIONS = {  # of products: of float32, on plain units; "tf32x3" is near it, on tensor cores
    torch.float32: "ieee", torch.bfloat16: "tf32", torch.float16: "tf32",
}  # fmt: skip
# Sines and exponentials by special units, for half-precision inputs: their rounding is far larger.
BY_HARDWARE = True
MAX_WIDTH = 64  # of D and M: parameters and their sums stay in registers and shared memory
# Programs that a multiprocessor holds at a time, of bfloat16 and 32 channels, or of the front twice
# as many, and of sticks what was fastest for 8 and more of them; and blocks in one.
PROGRAMS = {"front": 12, "sticks": 6, "map gradient": 4, "stick gradient": 8}
MAX_BLOCKS = 32
# More sticks are a launch of their own: they want registers that the maps have other use for.
STICKS_TOGETHER = 4


class Plan(NamedTuple):
    """How a kernel's tokens are divided, and how it is launched."""

    tokens: int  # at once
    blocks: int  # of so many tokens in a chunk
    chunks: int  # of an image
    launch: dict[str, int]


def _choose(kernel: str, v: Tensor, num_features: int, roles: int = 1) -> Plan:
    B, H, W, N, D = v.shape
    tokens, launch = _block_table(kernel, v.dtype, max(D, num_features))
    blocks = _parts_of(H * W, tokens)  # of one head of one image
    share = _fullest(blocks, B * N * roles, PROGRAMS[kernel] * multiprocessors(v.device))
    share = max(share, _parts_of(blocks, 65535))  # programs are numbered by 16 bits
    return Plan(tokens, share, _parts_of(blocks, share), launch)


@lru_cache(4096)
def _fullest(blocks: int, heads: int, at_once: int) -> int:
    """How many of a head's blocks a program takes, so that the last round is full, or nearly.

    A power of two if that costs a twentieth at most: few kernels to compile.
    """
    counts = range(1, min(MAX_BLOCKS, max(blocks, 1)) + 1)

    def time(count: int) -> int:  # in blocks; to begin takes as long as one
        return _parts_of(heads * _parts_of(blocks, count), at_once) * (count + 1)

    best = min(map(time, counts))
    good = [count for count in counts if time(count) <= 1.05 * best]
    return min((c for c in good if c & (c - 1) == 0), default=min(good, key=time))


def _front_arguments(
    plan: Plan, v: Tensor, M: int, groups: int, options: FrontOptions, mask: Tensor | None,
    maps: bool, sums: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `front_kernel` from the factor on."""
    (N, D), (factor, unit) = v.shape[3:], _scale(options, v.shape[-1])
    return (
        factor, options.halt_threshold, N, D, M, _padded(D), _padded(M), _power_of_two(groups),
        unit, _offsets(groups, options), mask is not None, plan.tokens, plan.blocks,
        maps, sums, *_precisions(v.dtype, unit),
    )  # fmt: skip


def _map_arguments(
    plan: Plan, v: Tensor, M: int, options: FrontOptions, mask: Tensor | None
) -> tuple[Any, ...]:
    """The arguments of `map_gradient_kernel` from the factor to OVERLAP."""
    (N, D), (factor, unit) = v.shape[3:], _scale(options, v.shape[-1])
    return (
        factor, N, D, M, _padded(D), _padded(M), unit, mask is not None, plan.tokens, plan.blocks,
        *_precisions(v.dtype, unit), overlaps(),
    )  # fmt: skip


def _stick_arguments(
    plan: Plan, v: Tensor, groups: int, options: FrontOptions, mask: Tensor | None
) -> tuple[Any, ...]:
    """The arguments of `stick_gradient_kernel` from the threshold on."""
    N, D = v.shape[3:]
    return (
        options.halt_threshold, N, D, _padded(D), _padded(groups), _offsets(groups, options),
        mask is not None, plan.tokens, plan.blocks, PRECISIONS[v.dtype], _by_hardware(v.dtype),
        overlaps(),
    )  # fmt: skip


def _scale(options: FrontOptions, D: int) -> tuple[float, bool]:
    """The factor of a scaling, and whether it divides by the root mean square, too."""
    powers = {"none": 0.0, "scaled": -0.25, "unit": -0.5, "unit-scaled": -0.25}
    return D ** powers[options.scaling], options.scaling.startswith("unit")


def _offsets(groups: int, options: FrontOptions) -> tuple[float, ...]:
    return tuple(math.log(g) if options.balanced else 0.0 for g in range(groups - 1, 0, -1))


def _precisions(dtype: torch.dtype, unit: bool) -> tuple[int, str, bool]:
    """ANGLE_PARTS, PRECISION and HARDWARE."""
    parts = 3 if dtype == torch.bfloat16 and not unit else 2
    return parts, PRECISIONS[dtype], _by_hardware(dtype)


def _by_hardware(dtype: torch.dtype) -> bool:
    """Whether special units serve for sines and the like."""
    return dtype != torch.float32 and BY_HARDWARE and not INTERPRETED


def _block_table(kernel: str, dtype: torch.dtype, wide: int) -> tuple[int, dict[str, int]]:
    """Tokens at once and options of the launch, by the wider of heads and features."""
    if kernel == "sticks":
        return 64, {"num_warps": 4 if wide <= 32 else 8, "num_stages": 1}
    if kernel == "stick gradient":
        if wide <= 32:
            return 32, {"num_warps": 2, "num_stages": 1}
        return 64, {"num_warps": 8, "num_stages": 1}
    gradient = kernel == "map gradient"
    if dtype == torch.float32:  # products on plain units hold whole rows in registers
        return 16, {"num_warps": 8, "num_stages": 2}
    if dtype == torch.float16 and wide > 32:  # float32 operands, twice as large
        return 16 if gradient else 32, {"num_warps": 8, "num_stages": 2}
    if gradient and wide <= 32 and dtype == torch.bfloat16:
        return 64, {"num_warps": 2, "num_stages": 1}
    options = {"num_warps": 4, "num_stages": 1}
    if not gradient and wide <= 32 and dtype == torch.bfloat16:
        options["maxnreg"] = 80  # six programs at a time
    return 32 if gradient and wide > 32 else 64, options
