"""Sums over an image as Triton kernels: the far part of tiles, and all of linear attention.

Forward S = Σ_j φk_j [v_j, 1]ᵀ; backward T = Σ_i φq_i [∂o_i, −δ_i]ᵀ α_rest(i)/den_i. Programs sum
chunks of tokens (those of S come from `qkv_features` in a fused layer), which are added in a
fixed order, so results repeat bit for bit. Every query takes part of S, so it is split in two for
tensor cores, x = high + low; and its sum of ones in three, all of its bits, because differences of
denominators decide what counts as zero (`ops.common.flush_cancellation`).
This module imports triton.
"""

# ruff: noqa: SIM300

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ripple_attention.ops.kernels.common import (
    _add_products,
    _add_sums,
    _ceil_divide,
    _chunk,
    _load,
    _multiply,
    _offsets,
    _padded,
    _parts,
    _power_of_two,
)
from ripple_attention.ops.kernels.launch import launch, overlapping, overlaps

# Programs that form sums forward, all at once; each sums at most 2,048 tokens.
STATE_PROGRAMS = 768

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load_sums(
    base, head, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr,
):  # fmt: skip
    """The sums of a head, of (B, N, E+1, M): (PADDED_E, PADDED_M) and, of the ones, (PADDED_M)."""
    start = base + head * ((E + 1) * M)
    value, feature = tl.arange(0, PADDED_E), tl.arange(0, PADDED_M)
    mask = (value < E)[:, None] & (feature < M)[None, :]
    state = tl.load(start + value[:, None] * M + feature[None, :], mask=mask, other=0.0)
    return state, tl.load(start + E * M + feature, mask=feature < M, other=0.0)


@triton.jit
def _load_split_state(
    base, head, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """High or low parts of a head's sums, from `split_state_kernel`: (PADDED_E, PADDED_M)."""
    start = base + head * ((2 * E + 3) * M) + (E * M if LOW else 0)
    value, feature = tl.arange(0, PADDED_E)[:, None], tl.arange(0, PADDED_M)[None, :]
    return tl.load(start + value * M + feature, mask=(value < E) & (feature < M), other=0.0)


@triton.jit
def _load_split_ones(
    base, head, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The three parts of the sum that belongs to the ones, and zeros: (ROWS, PADDED_M)."""
    start = base + head * ((2 * E + 3) * M) + 2 * E * M
    part, feature = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED_M)[None, :]
    return tl.load(start + part * M + feature, mask=(part < 3) & (feature < M), other=0.0)


@triton.jit
def _times_state(inputs, state):
    """inputs @ state, for a float32 state."""
    if inputs.dtype == tl.float32:
        result = tl.dot(inputs, state, input_precision="ieee")
    else:
        parts = _parts(state, inputs.dtype, 2)
        result = _multiply(inputs.to(parts[0].dtype), parts, 2, False, "tf32")
    return result


@triton.jit
def _times_split_state(
    inputs, base, head, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """inputs (tokens, E) @ the sums of a head; where FLIP, inputs (tokens, M) @ their transpose."""
    if inputs.dtype == tl.float32:
        high = _load_split_state(base, head, M, E, PADDED_M, PADDED_E, False)
        result = tl.dot(inputs, tl.trans(high) if FLIP else high, input_precision="ieee")
    elif PADDED_M * PADDED_E <= 64 * 64:  # both loaded at once
        high = _load_split_state(base, head, M, E, PADDED_M, PADDED_E, False)
        low = _load_split_state(base, head, M, E, PADDED_M, PADDED_E, True)
        exact = inputs.to(high.dtype)
        result = tl.dot(exact, tl.trans(low) if FLIP else low, input_precision="tf32")
        result = tl.dot(exact, tl.trans(high) if FLIP else high, result, input_precision="tf32")
    else:  # one after the other, in the same shared memory
        low = _load_split_state(base, head, M, E, PADDED_M, PADDED_E, True)
        exact = inputs.to(low.dtype)
        result = tl.dot(exact, tl.trans(low) if FLIP else low, input_precision="tf32")
        high = _load_split_state(base, head, M, E, PADDED_M, PADDED_E, False)
        result = tl.dot(exact, tl.trans(high) if FLIP else high, result, input_precision="tf32")
    return result


@triton.jit
def state_kernel(
    first, features, values, weights, delta, inverse, partial, feature_strides, value_strides,
    weight_strides, H, W, chunks, N: tl.constexpr, M: tl.constexpr, E: tl.constexpr,
    PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr, FLAT: tl.constexpr, BACKWARD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One chunk's share of a sum over the image, transposed: (E+1, M).

    Forward:  Sᵀ = Σ_j [v_j, 1] φk_jᵀ, of keys and values.
    BACKWARD: Tᵀ = Σ_i α_rest(i)/den_i · [∂o_i, −δ_i] φq_iᵀ, of queries and output gradients.
    FLAT: rows follow each other in memory as columns do.
    """
    if OVERLAP:
        gdc_launch_dependents()
    b, n, chunk = _chunk(first, N)
    features += b * feature_strides[0] + n * feature_strides[3]
    values += b * value_strides[0] + n * value_strides[3]
    if BACKWARD:
        weights += b * weight_strides[0] + n * weight_strides[3] + (GROUPS - 1) * weight_strides[4]
    total = tl.zeros((PADDED_E, PADDED_M), tl.float32)
    # Of the ones: 16 times the same by products, or all tokens apart, summed once, at the end.
    ones = tl.zeros((TOKENS if BACKWARD else 16, PADDED_M), tl.float32)
    for block in tl.range(BLOCKS, num_stages=1):  # with more, results change from run to run
        index = (chunk * BLOCKS + block) * TOKENS + tl.arange(0, TOKENS)
        inside = index < H * W
        row, column = index * 0, index
        if not FLAT:
            row, column = index // W, index % W
        feature = _load(features, _offsets(row, column, feature_strides, True), inside, M, PADDED_M)
        value = _load(values, _offsets(row, column, value_strides, True), inside, E, PADDED_E)
        if BACKWARD:
            at = _offsets(row, column, weight_strides, True)
            rest = tl.load(weights + at, mask=inside, other=0.0)
            token = b * H * W * N + index.to(tl.int64) * N + n
            weight = rest.to(tl.float32) * tl.load(inverse + token, mask=inside, other=0.0)
            weighted = tl.trans(value.to(tl.float32) * weight[:, None])
            total = _add_products(weighted, feature, total, True)
            weight *= -tl.load(delta + token, mask=inside, other=0.0)
            ones += feature.to(tl.float32) * weight[:, None]
        else:
            one = tl.full((16, TOKENS), 1.0, tl.float32).to(feature.dtype)
            if feature.dtype == tl.float32:
                total = _add_sums(tl.trans(value), feature, total)
                ones = _add_sums(one, feature, ones)
            else:
                total = tl.dot(tl.trans(value), feature, total)
                ones = tl.dot(one, feature, ones)
    start = partial + ((b * N + n) * chunks + chunk) * ((E + 1) * M)
    channel, m = tl.arange(0, PADDED_E), tl.arange(0, PADDED_M)
    mask = (channel < E)[:, None] & (m < M)[None, :]
    tl.store(start + channel[:, None] * M + m[None, :], total, mask=mask)
    tl.store(start + E * M + m, tl.sum(ones, 0) * (1.0 if BACKWARD else 0.0625), mask=m < M)


@triton.jit
def split_state_kernel(
    first, partial, split_state, chunks, M: tl.constexpr, E: tl.constexpr, DTYPE: tl.constexpr,
    ROUNDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds up a head's chunks, and cuts the sum in parts for tensor cores, rows of M: the high
    parts of its E rows, their low parts, and of the ones' row three parts, which are all its bits.

    DTYPE: of the inputs that it is to meet. The parts of float32 are the sum itself, and zero.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    size: tl.constexpr = (E + 1) * M
    inside = index < size
    chunk = tl.arange(0, 16)[:, None]
    total = tl.zeros((16, BLOCK), tl.float32)
    for step in range(ROUNDS):
        at = step * 16 + chunk
        start = partial + (head * chunks + at) * size
        total += tl.load(start + index[None, :], mask=(at < chunks) & inside[None, :], other=0.0)
    of_ones = inside & (index >= E * M)
    high, low, last = (
        tl.sum(total, 0),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )
    if DTYPE != tl.float32:
        parts = _parts(high, DTYPE, 3)
        high, low, last = parts[0], parts[1], parts[2]
    split_state += head * ((2 * E + 3) * M)
    at = split_state + tl.where(of_ones, index + E * M, index)
    tl.store(at, high, mask=inside)
    tl.store(at + tl.where(of_ones, M, E * M), low, mask=inside)
    tl.store(at + 2 * M, last, mask=of_ones)


def _sum_state(partial: Tensor) -> Tensor:
    """S or T from the shares of chunks, (B, N, E+1, M), in a fixed order."""
    return partial[:, :, 0] if partial.shape[2] == 1 else partial.sum(2)


def _split_state(
    split_state: Tensor, partial: Tensor, dtype: torch.dtype, overlap: bool = True
) -> Tensor:
    """The same in parts, written to (B, N, 2E+3, M) as `split_state_kernel` has it.

    Args:
        split_state: Where to.
        partial: Shares of chunks, as `_sum_chunks` has them.
        dtype: Of the inputs that it is to meet.
        overlap: Whether this may start before the kernel before it ends. Not after
            `qkv_features`: tiles read what that writes as soon as this one has started.
    """
    B, N, chunks, rows, M = partial.shape
    rounds, block = _power_of_two(_ceil_divide(chunks, 16)), 128
    launch(
        split_state_kernel, (B * N, _ceil_divide(rows * M, block), 1),
        partial, split_state, chunks, M, rows - 1, TYPES[dtype], rounds, block, overlaps(),
        num_warps=4, **(overlapping() if overlap else {}),
    )  # fmt: skip
    return split_state


def _sum_chunks(
    features: Tensor, values: Tensor, spatial_weights: Tensor,
    delta: Tensor | None = None, inverse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The shares of chunks of tokens in S or T, (B, N, chunks, E+1, M)."""
    (B, H, W, N, M), E, backward = features.shape, values.shape[-1], delta is not None
    wide = max(M, E) * features.element_size()
    exact = features.dtype == torch.float32
    tokens, blocks, options = _choose_state(B * N, H * W, wide, backward, exact)
    chunks = _ceil_divide(H * W, tokens * blocks)
    read = (features, values, spatial_weights) if backward else (features, values)
    flat = all(x.stride(1) == W * x.stride(2) for x in read)
    partial = features.new_empty(B, N, chunks, E + 1, M, dtype=torch.float32)
    launch(
        state_kernel, (N, chunks, B),
        features, values, spatial_weights, delta, inverse, partial,
        features.stride(), values.stride(), spatial_weights.stride(), H, W, chunks,
        N, M, E, _padded(M), _padded(E), spatial_weights.shape[-1], tokens, blocks,
        flat, backward, overlaps(), **options,
    )  # fmt: skip
    return partial


def _choose_state(
    heads: int, tokens: int, wide: int, backward: bool, exact: bool
) -> tuple[int, int, dict[str, int]]:
    """Tokens at once, how often, and the launch of `state_kernel`, by bytes of its wider input.

    Where inputs are `exact`, sums of float32 are short, as rounding grows with their length.
    """
    block, warps = (128, 2) if wide <= 64 else (64, 4) if wide <= 128 else (32, 8)
    if exact:
        block = 32
    if backward and wide <= 64:
        block, warps = 32, 1
    share = max(heads * tokens // (4 * STATE_PROGRAMS if backward else STATE_PROGRAMS), block)
    blocks = _power_of_two(_ceil_divide(min(share, 2048, tokens), block))  # few kernels to compile
    if backward and block * blocks > share:
        blocks //= 2
    return block, blocks, {"num_warps": warps, "num_stages": 1}
