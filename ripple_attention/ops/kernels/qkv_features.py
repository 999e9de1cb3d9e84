"""Features and spatial weights of an attention layer as Triton kernels, and their gradients.

From q, k and v, as they lie in one qkv projection, to what the attention itself takes: φ(q) and
φ(k) as in `features`, α as in `weights`, and, where a sum over the image follows, shares of
Σ φ(k)vᵀ. Maps and weights can be had without each other. One kernel does it, in three roles: a
program maps queries, or maps keys and sums, or makes weights. (A program that does all three at
once holds twice the registers, and half as many run at a time.) Every program loads a block of
tokens while it computes the one before. Only results are written.

Precision. All is float32 but for the operands of matrix products, which for half-precision inputs
are cut into parts that tensor cores take: bfloat16 parts for bfloat16 inputs; for float16, whose
exponents would be too few, tf32 parts, with as many bits. How many parts:

| product | operands | why |
|---|---|---|
| angles W₁x̂ | x exact; W₁ in two, or three (tf32: two) where nothing bounds x̂ | sines amplify |
| A b(x̂), back, and ∂A | one and one | what `fc` does under autocast |
| y = W₁ᵀt; ∂W₁ = Σ t xᵀ | t in one, W₁ in two; x exact | PyTorch rounds the sines' gradient, too |
| logits | v exact, Pᵀe_g in three | sticks amplify |
| ∂v = Σ ∂o_g Pᵀe_g; Σ ∂o vᵀ | two and two; ∂o in two, v exact | they are small |

Products of float32 inputs follow `PRECISIONS`.

The gradients of a wide map with sines do not fit into registers beside each other: a program goes
through its tokens for one piece of the sines after the other, and adds up their shares of ∂x.
This module imports triton: import it where it is used.
"""

# Tuples of tensors grow by +, the only way that Triton reads.

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ripple_attention.feature_maps import Scaling
from ripple_attention.ops.kernels.common import (
    _add_sums,
    _ceil_divide,
    _chunk,
    _dense_channels,
    _load,
    _multiply,
    _padded,
    _parts,
    _rounded,
    _store,
    _store_matrix,
)
from ripple_attention.ops.kernels.features import (
    _activated,
    _before_activation,
    _length,
    _load_map,
    _sines_of_tokens,
    _through_activation,
)
from ripple_attention.ops.kernels.launch import (
    INTERPRETED,
    launch,
    multiprocessors,
    overlapping,
    overlaps,
)
from ripple_attention.ops.kernels.weights import _load_logits, _logit_gradient, _weights_of

# Kernels. Letters are those of `features` and `weights`. A program takes a chunk of the tokens of
# one head, BLOCKS times TOKENS of them, whose rows follow each other as columns do. Long lists of
# arguments stand by kind.
# fmt: off


@triton.jit
def _corner_of(base, strides, b, start, n):
    """A pointer to a token's head."""
    return base + (b * strides[0] + start * strides[2] + n * strides[3])


@triton.jit
def _tokens_of(block, b, n, L, mask, mask_strides, MASKED: tl.constexpr, TOKENS: tl.constexpr):
    """A block's first token, its tokens from there, which are in the image, and which present."""
    start, index = block.to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    inside = start + index < L
    present = inside
    if MASKED:
        at = _corner_of(mask, mask_strides, b, start, n) + index * mask_strides[2]
        present = inside & (tl.load(at, mask=inside, other=1) == 0)
    return start, index, inside, present


@triton.jit
def _load_block(
    base, strides, b, start, index, n, there, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):
    """Channels of a block of tokens, zero where not there."""
    return _load(_corner_of(base, strides, b, start, n), index * strides[2], there, WIDTH, PADDED)


@triton.jit
def _store_block(
    base, strides, b, start, index, n, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):
    _store(_corner_of(base, strides, b, start, n), index * strides[2], inside, x, WIDTH, PADDED)


@triton.jit
def _load_next(
    x, strides, chunk, block, b, n, L, mask, mask_strides, D: tl.constexpr, PADDED_D: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """A block of a chunk, zero where not present, and zero beyond the chunk."""
    start, index, _, present = _tokens_of(
        chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
    return _load_block(x, strides, b, start, index, n, present & (block < BLOCKS), D, PADDED_D)


@triton.jit
def _map_chunk(
    x, v, mask, w1, matrix, bias, phi, partial, x_strides, v_strides, mask_strides, phi_strides,
    b, n, chunk, L, chunks, factor, D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_M: tl.constexpr, UNIT: tl.constexpr, PER_HEAD: tl.constexpr, ACTIVATION: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, SUMS: tl.constexpr,
    N: tl.constexpr, ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """φ(x) of a chunk of one head, zero where MASKED says so; and where SUMS its share of
    Σ [v, 1] φ(x)ᵀ, (D+1, M)."""
    dtype: tl.constexpr = x.dtype.element_ty
    maps, added = _load_map(w1, matrix, bias, n, 0, D, M, PADDED_D, PADDED_M, 1, PER_HEAD, dtype,
                            ANGLE_PARTS)
    total = tl.zeros((PADDED_D, PADDED_M), tl.float32)
    ones_total = tl.zeros((16, PADDED_M), tl.float32)  # 16 times the same: faster than shuffles
    upcoming = _load_next(x, x_strides, chunk, 0, b, n, L, mask, mask_strides, D, PADDED_D,
                          MASKED, TOKENS, BLOCKS)
    for block in tl.range(BLOCKS, num_stages=1):  # as in `far.state_kernel`
        token = upcoming
        upcoming = _load_next(x, x_strides, chunk, block + 1, b, n, L, mask, mask_strides, D,
                              PADDED_D, MASKED, TOKENS, BLOCKS)
        start, index, inside, present = _tokens_of(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
        wide = token.to(tl.float32)
        scale, _ = _length(wide, factor, D, UNIT, HARDWARE)
        z = _before_activation(token, wide, maps, added, scale, w1 is not None, UNIT, dtype,
                               PRECISION, HARDWARE)
        features = _activated(z, M, ACTIVATION)
        if MASKED or SUMS:
            features = tl.where(present[:, None], features, 0.0)
        _store_block(phi, phi_strides, b, start, index, n, inside, features, M, PADDED_M)
        if SUMS:
            features = features.to(dtype)  # as they are stored
            value = tl.trans(_load_block(v, v_strides, b, start, index, n, present, D, PADDED_D))
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
def _weigh_chunk(
    v, mask, proj_w, proj_b, embedding, alpha, v_strides, mask_strides, alpha_strides,
    b, n, chunk, L, threshold, D: tl.constexpr, PADDED_D: tl.constexpr, G: tl.constexpr,
    PADDED_G: tl.constexpr, STICKS: tl.constexpr, BALANCED: tl.constexpr, TRUNCATED: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """α of a chunk of one head."""
    dtype: tl.constexpr = v.dtype.element_ty
    vectors, constants = _load_logits(embedding, proj_w, proj_b, n, G - 1 if STICKS else G, D,
                                      PADDED_D, PADDED_G, BALANCED, dtype)
    upcoming = _load_next(v, v_strides, chunk, 0, b, n, L, mask, mask_strides, D, PADDED_D,
                          MASKED, TOKENS, BLOCKS)
    for block in range(BLOCKS):
        value = upcoming
        upcoming = _load_next(v, v_strides, chunk, block + 1, b, n, L, mask, mask_strides, D,
                              PADDED_D, MASKED, TOKENS, BLOCKS)
        weights = _weights_of(value, vectors, constants, threshold, G, STICKS, TRUNCATED, dtype,
                              PRECISION, HARDWARE)
        start, index, inside, _ = _tokens_of(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, False, TOKENS)
        _store_block(alpha, alpha_strides, b, start, index, n, inside, weights, G, PADDED_G)


@triton.jit
def qkv_features_kernel(
    first, q, k, v, mask, w1, matrix, bias, proj_w, proj_b, embedding, phi_q, phi_k, alpha, partial,
    q_strides, k_strides, v_strides, mask_strides, phi_strides, alpha_strides,
    L, chunks, factor, threshold, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_M: tl.constexpr, G: tl.constexpr, PADDED_G: tl.constexpr,
    UNIT: tl.constexpr, PER_HEAD: tl.constexpr, ACTIVATION: tl.constexpr, STICKS: tl.constexpr,
    BALANCED: tl.constexpr, TRUNCATED: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """For a chunk of one head, by the program's role: φ(q); or φ(k), and where `partial` is there
    its share of Σ [v, 1] φ(k)ᵀ; or α. Without phi_q there are no maps, without alpha no weights.
    Roles of a chunk run together, as q, k and v lie."""
    b, n, chunk = _chunk(first, N)
    role = 2
    if phi_q is not None:
        role = tl.program_id(0) // N
    if phi_q is not None:
        if role == 0:
            _map_chunk(
                q, v, mask, w1, matrix, bias, phi_q, partial, q_strides, v_strides, mask_strides,
                phi_strides, b, n, chunk, L, chunks, factor, D, M, PADDED_D, PADDED_M, UNIT,
                PER_HEAD, ACTIVATION, False, TOKENS, BLOCKS, False, N, ANGLE_PARTS, PRECISION,
                HARDWARE)
        if role == 1:
            _map_chunk(
                k, v, mask, w1, matrix, bias, phi_k, partial, k_strides, v_strides, mask_strides,
                phi_strides, b, n, chunk, L, chunks, factor, D, M, PADDED_D, PADDED_M, UNIT,
                PER_HEAD, ACTIVATION, MASKED, TOKENS, BLOCKS, partial is not None, N, ANGLE_PARTS,
                PRECISION, HARDWARE)
    if alpha is not None:  # noqa: SIM102, of which the one is known when compiling
        if role == 2:
            _weigh_chunk(
                v, mask, proj_w, proj_b, embedding, alpha, v_strides, mask_strides, alpha_strides,
                b, n, chunk, L, threshold, D, PADDED_D, G, PADDED_G, STICKS, BALANCED, TRUNCATED,
                MASKED, TOKENS, BLOCKS, PRECISION, HARDWARE)


@triton.jit
def _store_map_gradient(
    partial, totals, bias_total, first: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    width: tl.constexpr, ANGLES: tl.constexpr, MATRIX: tl.constexpr, BIAS: tl.constexpr,
):
    """Stores ∂W₁, ∂A and ∂c of the sines from `first` on."""
    rows: tl.constexpr = D - first if D - first < width else width
    if ANGLES:
        _store_matrix(partial + first * D, D, totals[2], rows, D)
        partial += D * D
        _store_matrix(partial + first, 2 * D, totals[0], M, rows)
        _store_matrix(partial + D + first, 2 * D, totals[1], M, rows)
        partial += 2 * D * M
    elif MATRIX:
        _store_matrix(partial, D, totals[0], M, D)
        partial += D * M
    if BIAS:
        _store_matrix(partial, M, bias_total, 1, M)


@triton.jit
def _map_gradient_chunk(
    grad_phi, phi, x, mask, w1, matrix, bias, grad_x, partial,
    grad_phi_strides, phi_strides, x_strides, mask_strides, grad_x_strides,
    b, n, chunk, L, factor, D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_M: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr, PER_HEAD: tl.constexpr,
    ACTIVATION: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """∂x of a chunk of one head, and its share of the map's gradients: ∂W₁, ∂A and ∂c in a row.

    With ∂b = Aᵀ∂z = [∂sin; ∂cos] and t = scale·(∂sin·cos − ∂cos·sin), ∂W₁ = Σ t xᵀ and y = W₁ᵀt;
    without sines t = scale·∂z, ∂A = Σ t xᵀ and y = Aᵀt. Then ∂x = y − x ⟨y, x⟩/(D·mean square).
    """
    dtype: tl.constexpr = x.dtype.element_ty
    angles: tl.constexpr = w1 is not None
    width: tl.constexpr = PADDED_D // PIECES
    for piece in tl.static_range(PIECES):
        if piece > 0:
            tl.debug_barrier()  # ∂x is read again
        maps, added = _load_map(w1, matrix, bias, n, piece, D, M, PADDED_D, PADDED_M, PIECES,
                                PER_HEAD, dtype, ANGLE_PARTS)
        half = tl.zeros((PADDED_M, width), tl.float32)
        totals = (half,)  # ∂A, its two halves where there are sines, and ∂W₁
        if angles:
            totals = (half, half, tl.zeros((width, PADDED_D), tl.float32))
        bias_total = tl.zeros((16, PADDED_M), tl.float32)
        for block in range(BLOCKS):
            start, index, inside, present = _tokens_of(
                chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
            upstream = _load_block(
                grad_phi, grad_phi_strides, b, start, index, n, present, M, PADDED_M)
            token = _load_block(x, x_strides, b, start, index, n, present, D, PADDED_D)
            upstream, wide = upstream.to(tl.float32), token.to(tl.float32)
            scale, inverse = _length(wide, factor, D, UNIT, HARDWARE)
            if ACTIVATION == "relu":
                z = _load_block(phi, phi_strides, b, start, index, n, present, M, PADDED_M)
            else:
                z = _before_activation(token, wide, maps, added, scale, angles, UNIT, dtype,
                                       PRECISION, HARDWARE)
            upstream = _through_activation(upstream, z, M, ACTIVATION)  # ∂z
            if bias is not None:
                ones = _rounded(tl.full((16, TOKENS), 1.0, tl.float32), dtype)  # not shuffles
                bias_total = tl.dot(ones, _rounded(upstream, dtype), bias_total,
                                    input_precision=PRECISION)
            if angles:
                sines, taken = _sines_of_tokens(
                    token, maps[0], scale, UNIT, dtype, PRECISION, HARDWARE)
                upstream = _rounded(upstream, dtype)
                gradient = _multiply(upstream, maps[1], 1, True, PRECISION) * sines[1]
                gradient -= _multiply(upstream, maps[2], 1, True, PRECISION) * sines[0]
                gradient = _rounded(gradient * scale[:, None], dtype)  # t
                flipped = tl.trans(upstream)
                totals = (
                    tl.dot(flipped, taken[0], totals[0], input_precision=PRECISION),
                    tl.dot(flipped, taken[1], totals[1], input_precision=PRECISION),
                    tl.dot(tl.trans(gradient), _rounded(token, dtype), totals[2],
                           input_precision=PRECISION))
                gradient = _multiply(gradient, maps[0], 2, True, PRECISION)  # y
            elif matrix is not None:
                gradient = _rounded(upstream * scale[:, None], dtype)  # t
                totals = (tl.dot(tl.trans(gradient), _rounded(token, dtype), totals[0],
                                 input_precision=PRECISION),)
                gradient = _multiply(gradient, maps[0], 1, True, PRECISION)  # y
            else:
                gradient = upstream * scale[:, None]
            if UNIT:
                along = tl.sum(gradient * wide, 1) * inverse / D
                gradient -= wide * along[:, None]
            if piece > 0:
                gradient += _load_block(
                    grad_x, grad_x_strides, b, start, index, n, inside, D, PADDED_D)
            if MASKED:
                gradient = tl.where(present[:, None], gradient, 0.0)
            _store_block(grad_x, grad_x_strides, b, start, index, n, inside, gradient, D, PADDED_D)
        _store_map_gradient(
            partial, totals, bias_total, piece * width, D, M, width, angles, matrix is not None,
            bias is not None)


@triton.jit
def map_gradient_kernel(
    first, grad_phi_q, grad_phi_k, phi_q, phi_k, q, k, mask, w1, matrix, bias, grad_q, grad_k,
    partial, grad_phi_q_strides, grad_phi_k_strides, phi_strides, q_strides, k_strides,
    mask_strides, grad_strides,
    L, chunks, size, factor, N: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_M: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr,
    PER_HEAD: tl.constexpr, ACTIVATION: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, ANGLE_PARTS: tl.constexpr, PRECISION: tl.constexpr,
    HARDWARE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """∂q or ∂k of a chunk of one head, by the program's role, and its share of the map's gradients,
    of which `partial` has `size` numbers for each role, image, chunk and head."""
    if OVERLAP:
        gdc_launch_dependents()
    b, n, chunk = _chunk(first, N)
    role = tl.program_id(0) // N
    partial += (((b * chunks + chunk) * 2 + role) * N + n) * size
    if role == 0:
        _map_gradient_chunk(
            grad_phi_q, phi_q, q, mask, w1, matrix, bias, grad_q, partial, grad_phi_q_strides,
            phi_strides, q_strides, mask_strides, grad_strides, b, n, chunk, L, factor, D, M,
            PADDED_D, PADDED_M, PIECES, UNIT, PER_HEAD, ACTIVATION, False, TOKENS, BLOCKS,
            ANGLE_PARTS, PRECISION, HARDWARE)
    else:
        _map_gradient_chunk(
            grad_phi_k, phi_k, k, mask, w1, matrix, bias, grad_k, partial, grad_phi_k_strides,
            phi_strides, k_strides, mask_strides, grad_strides, b, n, chunk, L, factor, D, M,
            PADDED_D, PADDED_M, PIECES, UNIT, PER_HEAD, ACTIVATION, MASKED, TOKENS, BLOCKS,
            ANGLE_PARTS, PRECISION, HARDWARE)


@triton.jit
def weight_gradient_kernel(
    first, grad_alpha, grad_value, v, mask, proj_w, proj_b, embedding, grad_v, partial,
    grad_alpha_strides, grad_value_strides, v_strides, mask_strides, grad_v_strides,
    L, chunks, threshold, N: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
    G: tl.constexpr, PADDED_G: tl.constexpr, STICKS: tl.constexpr, BALANCED: tl.constexpr,
    TRUNCATED: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
    PRECISION: tl.constexpr, HARDWARE: tl.constexpr, OVERLAP: tl.constexpr,
):
    """∂v += Σ_g ∂o_g Pᵀe_g of a chunk of one head, and its share of Σ ∂o_g v and Σ ∂o_g."""
    if OVERLAP:
        gdc_launch_dependents()
    dtype: tl.constexpr = v.dtype.element_ty
    logits: tl.constexpr = G - 1 if STICKS else G
    b, n, chunk = _chunk(first, N)
    vectors, constants = _load_logits(embedding, proj_w, proj_b, n, logits, D, PADDED_D, PADDED_G,
                                      BALANCED, dtype)
    vector_total = tl.zeros((PADDED_G, PADDED_D), tl.float32)
    constant_total = tl.zeros((TOKENS, PADDED_G), tl.float32)  # summed once, at the end
    for block in range(BLOCKS):
        start, index, inside, present = _tokens_of(
            chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
        value = _load_block(v, v_strides, b, start, index, n, present, D, PADDED_D)
        upstream = _load_block(
            grad_alpha, grad_alpha_strides, b, start, index, n, inside, G, PADDED_G)
        columns = _logit_gradient(value, upstream.to(tl.float32), vectors, constants, threshold, G,
                                  STICKS, TRUNCATED, dtype, PRECISION, HARDWARE)
        gradient = tl.zeros((TOKENS, PADDED_D), tl.float32)
        if grad_value is not None:
            gradient += _load_block(
                grad_value, grad_value_strides, b, start, index, n, present, D, PADDED_D)
        parts = _parts(columns, dtype, 2)
        for i in tl.static_range(len(parts) - 1, -1, -1):
            gradient += _multiply(parts[i], vectors, 2, False, PRECISION)
        if MASKED:
            gradient = tl.where(present[:, None], gradient, 0.0)
        _store_block(grad_v, grad_v_strides, b, start, index, n, inside, gradient, D, PADDED_D)
        constant_total += columns
        parts, exact = _parts(tl.trans(columns), dtype, 2), _rounded(value, dtype)
        for i in tl.static_range(len(parts) - 1, -1, -1):
            vector_total = tl.dot(parts[i], exact, vector_total, input_precision=PRECISION)
    start = partial + ((b * chunks + chunk) * N + n) * (logits * (D + 1))
    _store_matrix(start, D, vector_total, logits, D)
    group = tl.arange(0, PADDED_G)
    tl.store(start + logits * D + group, tl.sum(constant_total, 0), mask=group < logits)
    if OVERLAP:
        gdc_wait()


# Launchers


class FeatureParameters(NamedTuple):
    """What is learned, float32; None for what a map or its weights do not have."""

    w1: Tensor | None = None  # W₁ (D, D)
    matrix: Tensor | None = None  # A (M, 2D), for sines then cosines; or (N, M, D), without sines
    bias: Tensor | None = None  # c (M,) or (N, M)
    proj_weight: Tensor | None = None  # P (D, D)
    proj_bias: Tensor | None = None  # p (D,)
    embedding: Tensor | None = None  # e (N, logits, D); without it there are no weights


class FeatureOptions(NamedTuple):
    """What is not learned."""

    activation: str = "relu"  # "elu" or "softmax"; "" for no map at all
    scaling: Scaling = "unit"  # as in `FeatureMap`
    sticks: bool = True  # else α is a softmax of its logits
    balanced: bool = True  # as in `stick_breaking`
    truncated: bool = False  # whether the rest weighs nothing
    halt_threshold: float = 0.001  # τ of `halt`, whose tail is "share"


def qkv_features_forward(
    q: Tensor | None, k: Tensor | None, v: Tensor, parameters: FeatureParameters,
    options: FeatureOptions, groups: int = 0, mask: Tensor | None = None, sums: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Features of queries and keys, spatial weights, and sums over chunks of tokens.

    Args:
        q, k, v: Queries, keys and values (B, H, W, N, D), before the feature map. Of any strides:
            they are read in place where the channels of a head lie next to each other. Where there
            is no map, q and k are None.
        parameters, options: Of the feature map and the weights.
        groups: G, of the weights.
        mask: Bool (B, H, W), True for padded tokens: their k and v count as 0, whatever stands
            there, and their φ(k) is 0. (v itself stays as it is: a NaN in it is the caller's.)
        sums: Whether sums are asked for.

    Returns:
        φ(q) and φ(k), (B, H, W, N, M), in the type of q, or None; α (B, H, W, N, G) in float32, or
        None; the shares of chunks in Σ_j [v_j, 1] φ(k_j)ᵀ, (B, N, chunks, D+1, M) in float32, or
        None. Results repeat bit for bit.
    """
    q, k, v = (_flat(v if x is None else x) for x in (q, k, v))
    parameters, mask = _as_read(parameters), None if mask is None else _in_rows(mask)
    tokens, M = v.shape[:-1], _num_features(v, parameters)
    if not sums:
        v, q, k, mask = _as_one_image(v, q, k, mask)
    B, H, W, N, D = v.shape
    weighs = parameters.embedding is not None
    plan = _choose("forward", v, M, (2 if options.activation else 0) + weighs)
    phi_q, phi_k = ((v.new_empty(B, H, W, N, M) if options.activation else None) for _ in range(2))
    alpha = v.new_empty(B, H, W, N, groups, dtype=torch.float32) if weighs else None
    partial = v.new_empty(B, N, plan.chunks, D + 1, M, dtype=torch.float32) if sums else None
    factor, unit = _scale(options, D)
    roles = (2 if options.activation else 0) + weighs
    if v.numel() and roles:
        with torch.cuda.device_of(v):
            launch(
                qkv_features_kernel, (roles * N, plan.chunks, B),
                q, k, v, mask, *parameters, phi_q, phi_k, alpha, partial, _strides(q), _strides(k),
                v.stride(), _strides(mask), _strides(phi_q), _strides(alpha),
                H * W, plan.chunks, factor, options.halt_threshold,
                N, D, M, _padded(D), _padded(M), groups, _padded(groups), unit,
                _is_per_head(parameters), options.activation, options.sticks, options.balanced,
                options.truncated, mask is not None, plan.tokens, plan.blocks,
                *_precisions(v.dtype, unit), **plan.launch)
    results = (None if x is None else x.view(*tokens, x.shape[-1]) for x in (phi_q, phi_k, alpha))
    return *results, partial


def map_backward(
    grad_phi_q: Tensor, grad_phi_k: Tensor, phi_q: Tensor, phi_k: Tensor, q: Tensor, k: Tensor,
    parameters: FeatureParameters, options: FeatureOptions, mask: Tensor | None,
    grad_q: Tensor, grad_k: Tensor,
) -> list[Tensor | None]:
    """Writes ∂q and ∂k, zero for padded keys, and returns the gradients of W₁, A and c.

    Args:
        grad_phi_q, grad_phi_k, phi_q, phi_k: (B, H, W, N, M).
        q, k, parameters, options, mask: As in `qkv_features_forward`.
        grad_q, grad_k: (B, H, W, N, D), where to write, channels next to each other, with the same
            strides.
    """
    tensors = (_flat(x) for x in (q, k, grad_phi_q, grad_phi_k, phi_q, phi_k))
    parameters, mask = _as_read(parameters), None if mask is None else _in_rows(mask)
    q, k, grad_phi_q, grad_phi_k, phi_q, phi_k, grad_q, grad_k, mask = _as_one_image(
        *tensors, grad_q, grad_k, mask)
    (B, H, W, N, D), M, learned = q.shape, _num_features(q, parameters), parameters[:3]
    plan = _choose("map gradient", q, M, 2)
    per_head = _is_per_head(parameters)
    sizes = [0 if x is None else x[0].numel() if per_head else x.numel() for x in learned]
    make = q.new_empty if q.numel() else q.new_zeros
    partial = make(B * plan.chunks * 2, N, sum(sizes), dtype=torch.float32)
    factor, unit = _scale(options, D)
    if q.numel():
        with torch.cuda.device_of(q):
            launch(
                map_gradient_kernel, (2 * N, plan.chunks, B),
                grad_phi_q, grad_phi_k, phi_q, phi_k, q, k, mask, *learned, grad_q, grad_k, partial,
                grad_phi_q.stride(), grad_phi_k.stride(), phi_q.stride(), q.stride(), k.stride(),
                _strides(mask), grad_q.stride(), H * W, plan.chunks, sum(sizes), factor,
                N, D, M, _padded(D), _padded(M), _pieces(parameters, D, M), unit, per_head,
                options.activation, mask is not None, plan.tokens, plan.blocks,
                *_precisions(q.dtype, unit), overlaps(), **plan.launch)
    totals = partial.sum(0) if per_head else partial.flatten(0, 1).sum(0)
    pieces = [x.clone() for x in totals.split(sizes, -1)]  # custom operators may return no views
    return [None if x is None else y.reshape(x.shape) for x, y in zip(learned, pieces, strict=True)]


def weights_backward(
    grad_alpha: Tensor, grad_value: Tensor | None, v: Tensor, parameters: FeatureParameters,
    options: FeatureOptions, mask: Tensor | None, grad_v: Tensor, follows: bool = False,
) -> list[Tensor]:
    """Writes ∂v, zero for padded values, and returns the gradients of P, p and e.

    Args:
        grad_alpha: ∂α (B, H, W, N, G).
        grad_value: ∂v (B, H, W, N, D) from all but α, which is added; it may be grad_v.
        v, parameters, options, mask: As in `qkv_features_forward`.
        grad_v: (B, H, W, N, D), where to write, channels next to each other.
        follows: Whether this may start before the kernel of `map_backward` ends.
    """
    tensors = (None if x is None else _flat(x) for x in (v, grad_alpha, grad_value))
    parameters, mask = _as_read(parameters), None if mask is None else _in_rows(mask)
    v, grad_alpha, grad_value, mask, grad_v = _as_one_image(*tensors, mask, grad_v)
    (B, H, W, N, D), groups = v.shape, grad_alpha.shape[-1]
    plan = _choose("weight gradient", v, D)
    weight, bias, embedding = parameters[3:]
    logits = embedding.shape[1]
    make = v.new_empty if v.numel() else v.new_zeros
    partial = make(B * plan.chunks, N, logits * (D + 1), dtype=torch.float32)
    if v.numel():
        with torch.cuda.device_of(v):
            launch(
                weight_gradient_kernel, (N, plan.chunks, B),
                grad_alpha, grad_value, v, mask, weight, bias, embedding, grad_v, partial,
                grad_alpha.stride(), _strides(grad_value), v.stride(), _strides(mask),
                grad_v.stride(), H * W, plan.chunks, options.halt_threshold,
                N, D, _padded(D), groups, _padded(groups), options.sticks, options.balanced,
                options.truncated, mask is not None, plan.tokens, plan.blocks,
                *_precisions(v.dtype, True)[1:], overlaps(), **plan.launch,
                **(overlapping() if follows else {}))
    vectors, constants = partial.sum(0).split([logits * D, logits], 1)  # Σ ∂o_g v; Σ ∂o_g
    vectors, rows = vectors.view_as(embedding), embedding.flatten(0, 1).mT  # (D, N·logits)
    return [
        rows @ vectors.flatten(0, 1),
        rows @ constants.flatten(),
        vectors @ weight.mT + constants[..., None] * bias,
    ]
# fmt: on


def _as_read(parameters: FeatureParameters) -> FeatureParameters:
    """The parameters as the kernels read them."""
    return FeatureParameters(*map(_plain, parameters))


def _plain(x: Tensor | None) -> Tensor | None:
    ready = x is None or (x.dtype is torch.float32 and x.is_contiguous())
    return x if ready else x.float().contiguous()


def _num_features(x: Tensor, parameters: FeatureParameters) -> int:
    return x.shape[-1] if parameters.matrix is None else parameters.matrix.shape[-2]


def _is_per_head(parameters: FeatureParameters) -> bool:
    return parameters.matrix is not None and parameters.matrix.dim() == 3


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
    if x is None:
        return (0,)
    return x.stride() if x.dim() == 5 else (*x.stride(), 0)  # a mask has no heads


# Choices

PRECISIONS = {  # of products: of float32, on plain units; "tf32x3" is near it, on tensor cores
    torch.float32: "ieee", torch.bfloat16: "tf32", torch.float16: "tf32",
}  # fmt: skip
# Sines and exponentials by special units, for half-precision inputs: their rounding is far larger.
BY_HARDWARE = True
MAX_BLOCKS = 32  # of tokens, in a program
BLOCKS = {  # by kernel and width: tokens, programs, warps, stages and, if limited, registers
    ("forward", 32): (64, 12, 4, 1, 80),  # six at a time, twice
    ("forward", 64): (64, 4, 4, 1),
    ("forward", 128): (64, 1, 8, 1),
    ("map gradient", 32): (64, 4, 2, 1),
    ("map gradient", 64): (32, 2, 8, 1),
    ("map gradient", 128): (32, 1, 8, 1),
    ("weight gradient", 32): (32, 8, 2, 1),
    ("weight gradient", 64): (64, 4, 8, 1),
    ("weight gradient", 128): (64, 4, 8, 1),
}


class Plan(NamedTuple):
    """How a kernel's tokens are divided, and how it is launched."""

    tokens: int  # at once
    blocks: int  # of so many tokens in a chunk
    chunks: int  # of an image
    launch: dict[str, int]


def _choose(kernel: str, x: Tensor, num_features: int, roles: int = 1) -> Plan:
    B, H, W, N, D = x.shape
    tokens, programs, launch = _block_table(kernel, x.dtype, max(D, num_features))
    blocks = _ceil_divide(H * W, tokens)  # of one head of one image
    share = _fullest(blocks, B * N * roles, programs * multiprocessors(x.device))
    share = max(share, _ceil_divide(blocks, 65535))  # programs are numbered by 16 bits
    return Plan(tokens, share, _ceil_divide(blocks, share), launch)


@lru_cache(4096)
def _fullest(blocks: int, heads: int, at_once: int) -> int:
    """How many of a head's blocks a program takes, so that the last round is full, or nearly.

    A power of two if that costs a twentieth at most: few kernels to compile.
    """
    counts = range(1, min(MAX_BLOCKS, max(blocks, 1)) + 1)

    def time(count: int) -> int:  # in blocks; to begin takes as long as one
        return _ceil_divide(heads * _ceil_divide(blocks, count), at_once) * (count + 1)

    best = min(map(time, counts))
    good = [count for count in counts if time(count) <= 1.05 * best]
    return min((c for c in good if c & (c - 1) == 0), default=min(good, key=time))


def _pieces(parameters: FeatureParameters, D: int, M: int) -> int:
    """Pieces of a map's sines, whose gradients are in registers at a time."""
    return 2 if parameters.w1 is not None and max(_padded(D), _padded(M)) > 64 else 1


def _scale(options: FeatureOptions, D: int) -> tuple[float, bool]:
    """The factor of a scaling, and whether it divides by the root mean square, too."""
    powers = {"none": 0.0, "scaled": -0.25, "unit": -0.5, "unit-scaled": -0.25}
    return D ** powers[options.scaling], options.scaling.startswith("unit")


def _precisions(dtype: torch.dtype, unit: bool) -> tuple[int, str, bool]:
    """ANGLE_PARTS, PRECISION and HARDWARE."""
    parts = 3 if dtype == torch.bfloat16 and not unit else 2
    return parts, PRECISIONS[dtype], dtype != torch.float32 and BY_HARDWARE and not INTERPRETED


def _block_table(kernel: str, dtype: torch.dtype, wide: int) -> tuple[int, int, dict[str, int]]:
    """Tokens at once, programs that a multiprocessor holds, and options of the launch.

    Args:
        kernel: "forward", "map gradient" or "weight gradient".
        dtype: Of the inputs.
        wide: The wider of heads and features.
    """
    at_most = 32 if wide <= 32 else 64 if wide <= 64 else 128
    if kernel == "weight gradient" or dtype == torch.bfloat16:
        tokens, programs, *launch = BLOCKS[kernel, at_most]
        return (
            tokens,
            programs,
            dict(zip(("num_warps", "num_stages", "maxnreg"), launch, strict=False)),
        )
    gradient = kernel == "map gradient"
    programs = (2 if gradient else 4) if wide <= 64 else 1
    if dtype == torch.float32:  # products on plain units hold whole rows in registers
        return 16, programs, {"num_warps": 8, "num_stages": 2}
    if wide > 32:  # float32 operands, twice as large
        return 16 if gradient else 32, programs, {"num_warps": 8, "num_stages": 2}
    return 64, 4, {"num_warps": 4, "num_stages": 1}
