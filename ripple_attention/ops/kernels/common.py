"""What the Triton kernels share: where tokens lie, how they are read, and products that keep bits.

How half-precision inputs keep float32 sums: products of inputs are exact, so they run on tensor
cores as they are. A float32 factor is brought to what tensor cores take: bfloat16 for bfloat16
inputs, 19-bit tf32 for float16 inputs, whose own exponents would be too few. It is rounded, or cut
into two or three parts whose sum it is. This module imports triton.
"""

# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`

# Names in kernels. M and E are the widths of features and values, PADDED_M and PADDED_E the powers
# of two that hold them. SINGLE_WINDOW: the window is the grid. RADII: the partition. Strides are
# those of (B, H, W, N), and of G for the weights. WIDE: offsets take 64 bits.


@triton.jit
def _place(first, N: tl.constexpr):
    """Batch, head, and row and column of the tile: heads of one tile run together, as they lie."""
    across = tl.program_id(0)
    return first + tl.program_id(2), across % N, tl.program_id(1), across // N


@triton.jit
def _chunk(first, N: tl.constexpr):
    """Batch, head, and chunk of tokens, where programs take these."""
    b, n, chunk, _ = _place(first, N)
    return b.to(tl.int64), n.to(tl.int64), chunk


@triton.jit
def _tile(
    down, across, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SINGLE_WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile's first row and column; its tokens' rows and columns from there; which there are.

    A run of the grid's tokens where SINGLE_WINDOW; else a rectangle of rows and columns.
    """
    index = tl.arange(0, ROWS * COLUMNS)
    if SINGLE_WINDOW:
        top, left = down * 0, across * 0
        index += down * ROWS * COLUMNS
        row, column = index // W, index % W
    else:
        top, left = down * ROWS, across * COLUMNS
        row, column = index // COLUMNS, index % COLUMNS
    return top, left, row, column, (top + row < H) & (left + column < W)


@triton.jit
def _corner(base, b, n, row, column, strides, WIDE: tl.constexpr):
    """A pointer to a token's head."""
    if WIDE:
        b, n, row, column = b.to(tl.int64), n.to(tl.int64), row.to(tl.int64), column.to(tl.int64)
    return base + (b * strides[0] + n * strides[3] + row * strides[1] + column * strides[2])


@triton.jit
def _token(b, n, row, column, H, W, N: tl.constexpr, WIDE: tl.constexpr):
    """The index of a token's head in a contiguous (B, H, W, N)."""
    if WIDE:
        b = b.to(tl.int64)
    return ((b * H + row) * W + column) * N + n


@triton.jit
def _offsets(row, column, strides, WIDE: tl.constexpr):
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    return row * strides[1] + column * strides[2]


@triton.jit
def _token_offsets(row, column, W, N: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        row, column = row.to(tl.int64), column.to(tl.int64)
    return (row * W + column) * N


@triton.jit
def _at(b, n, row, column, strides):
    """Offsets of tokens' heads, in 64 bits."""
    along = row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    return b * strides[0] + n * strides[3] + along


@triton.jit
def _span(
    span, left, column, W, STEP: tl.constexpr, SPAN: tl.constexpr, REACH: tl.constexpr,
    SINGLE_WINDOW: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of STEP rows of a window: rows, and columns from the tile's first; which columns
    there are; and how far a tile's are from them.

    The window begins REACH before its tile, or with the grid where SINGLE_WINDOW.
    """
    reach: tl.constexpr = 0 if SINGLE_WINDOW else REACH
    index = tl.arange(0, STEP * SPAN)
    others = span * SPAN + index % SPAN - reach
    present = (left + others >= 0) & (left + others < W)
    if not SINGLE_WINDOW:
        present = present & (others < COLUMNS + reach)
    return index // SPAN, others, present, tl.abs(column[:, None] - others[None, :])


@triton.jit
def _walk(
    base, b, n, row, column, below, others, strides, WIDE: tl.constexpr,
):  # fmt: skip
    """A pointer to the first row of a window, and offsets of some of its tokens from there."""
    corner = _corner(base, b, n, row, column, strides, WIDE)
    return corner, _offsets(below, others, strides, WIDE)


@triton.jit
def _channels(offsets, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Offsets of the channels of some tokens, (tokens, PADDED), and which of them exist."""
    channel = tl.arange(0, PADDED)
    mask = inside[:, None]
    if WIDTH != PADDED:
        mask = mask & (channel < WIDTH)[None, :]
    return offsets[:, None] + channel[None, :], mask


@triton.jit
def _load(base, offsets, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Channels of some tokens, (tokens, PADDED), zero outside the grid and beyond WIDTH."""
    offsets, mask = _channels(offsets, inside, WIDTH, PADDED)
    return tl.load(base + offsets, mask=mask, other=0.0)


@triton.jit
def _store(base, offsets, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes (tokens, PADDED), as `_load` reads it."""
    offsets, mask = _channels(offsets, inside, WIDTH, PADDED)
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_matrix(
    base, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED_ROWS: tl.constexpr, PADDED_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A matrix (ROWS, COLUMNS) with zeros around it."""
    row, column = tl.arange(0, PADDED_ROWS), tl.arange(0, PADDED_COLUMNS)
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store_matrix(base, stride, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tl.store(base + row[:, None] * stride + column[None, :], x, mask=mask)


@triton.jit
def _quotient(numerator, denominator, dtype: tl.constexpr):
    """numerator/denominator, and 0 where the latter counts as 0, as `safe_divide`; they broadcast.

    A GPU divides by a reciprocal, and up to two bits are wrong, which is nothing to half-precision
    inputs; for dtype float32 it is the nearest number, as in PyTorch: ∂o·v − ∂o·o may be all but 0.
    """
    empty = tl.abs(denominator) < SMALLEST
    denominator = tl.where(empty, 1.0, denominator)
    denominator = tl.where(tl.abs(denominator) < float("inf"), denominator, float("nan"))
    if dtype == tl.float32:
        return tl.where(empty, 0.0, tl.div_rn(numerator, denominator))
    else:
        return tl.where(empty, 0.0, numerator * (1.0 / denominator))


@triton.jit
def _inverse(denominator, dtype: tl.constexpr):
    """1/denominator, and 0 where it counts as 0, as `_quotient`."""
    return _quotient(tl.full(denominator.shape, 1.0, tl.float32), denominator, dtype)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x as tensor cores take it beside inputs of DTYPE: bfloat16, or float32 that holds tf32.

    It changes no input, and no float32 where inputs are float32.
    """
    x = x.to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float32)
    if tl.float16 == DTYPE:  # to the nearest number of tf32: the cores would drop the last bits
        near = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        x = tl.where(x == x, near, x)  # a GPU's NaN has all bits set, and would turn into −0
    return x


@triton.jit
def _parts(x, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """A float32 x as a sum of COUNT parts for tensor cores, the largest first; of x alone where
    inputs are float32. Three parts hold all bits."""
    parts = (_rounded(x, DTYPE),)
    for i in tl.static_range(COUNT - 1):
        if tl.float32 != DTYPE:
            x -= parts[i].to(tl.float32)
            parts = parts + (_rounded(x, DTYPE),)
    return parts


@triton.jit
def _multiply(left, right, COUNT: tl.constexpr, FLIP: tl.constexpr, PRECISION: tl.constexpr):
    """left @ right, or its transpose where FLIP, of the first COUNT parts, the smallest first."""
    total = tl.zeros((left.shape[0], right[0].shape[0 if FLIP else 1]), tl.float32)
    for i in tl.static_range(len(right) - 1, -1, -1):
        if i < COUNT:
            part = tl.trans(right[i]) if FLIP else right[i]
            total = tl.dot(left, part, total, input_precision=PRECISION)
    return total


@triton.jit
def _add_sums(x, y, total):
    """total + x @ y in float32, whose products are summed by themselves first, as PyTorch does:
    rounding grows with the length of a sum. (The signs: else Triton would make one sum of both.)"""
    return total - (-tl.dot(x, y, input_precision="ieee"))


@triton.jit
def _add_products(x, inputs, total, SPLIT: tl.constexpr):
    """total + x @ inputs, for a float32 x. Without SPLIT, x is rounded for tensor cores."""
    if inputs.dtype == tl.float32:
        total = _add_sums(x, inputs, total)
    else:
        parts = _parts(x, inputs.dtype, 2 if SPLIT else 1)
        for i in tl.static_range(len(parts) - 1, -1, -1):
            exact = inputs.to(parts[i].dtype)
            total = tl.dot(parts[i], exact, total, input_precision="tf32")
    return total


@triton.jit
def _pull(value, upstream, projection):
    """∂o_i·v_j − δ_i, (keys, queries). For float32, −δ comes first: the two may all but cancel."""
    if value.dtype == tl.float32:
        start = tl.broadcast_to(-projection[None, :], (value.shape[0], upstream.shape[0]))
        return tl.dot(value, tl.trans(upstream), start, input_precision="ieee")
    else:
        return tl.dot(value, tl.trans(upstream), input_precision="ieee") - projection[None, :]


# Outside of kernels


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# Triton has both, ten times as slow: kernels may call them, too.


def _ceil_divide(whole: int, part: int) -> int:
    """How many parts make up at least a whole."""
    return -(-whole // part)


def _power_of_two(x: int) -> int:
    """The next, or x itself."""
    return 1 << (x - 1).bit_length()


def _padded(width: int) -> int:
    """A width that tensor cores take."""
    return max(16, _power_of_two(width))


def are_odd(M: int, E: int) -> bool:
    """Whether widths of features and values are such that no product of warp groups is safe.

    Products of 64 rows and more are made by groups of four warps on a Hopper GPU, which find their
    operands by descriptors in uniform registers. Where two operands come to lie at one address of
    shared memory in different layouts, ptxas 12.8, of Triton 3.6 and 3.7, reads such a register
    before it is written: the product takes, from the 17th channel on, whatever stands elsewhere in
    shared memory. ptxas 13.1 compiles the same assembly right. It needs widths that are padded to
    different powers of two and are not copied 16 bytes at a time. So all widths but multiples of 8
    with the same padding go by fewer rows, or by fewer warps, than make a group.
    """
    return bool(M % 8 or E % 8 or _padded(M) != _padded(E))
