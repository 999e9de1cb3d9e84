"""What the Triton kernels share: where tokens lie, how they are read, and products that keep bits.

How half-precision inputs keep float32 sums: products of inputs are exact, so they run on tensor
cores as they are. A float32 factor is brought to what tensor cores take: bfloat16 for bfloat16
inputs, 19-bit tf32 for float16 inputs, whose own exponents would be too few. It is rounded, or cut
in two, x = high + low. This module imports triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code=assignment

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`

# Names in kernels. M and E are the widths of features and values, PADDED_M and PADDED_E the powers
# of two that hold them. WHOLE: the window is the grid. RADII: the partition. Strides are those of
# (B, H, W, N), and of G for the weights. WIDE: offsets take 64 bits.


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
    down, across, H, W, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile's first row and column; its tokens' rows and columns from there; which there are.

    A run of tokens where WHOLE, whose rows and columns are those of the grid; else a rectangle.
    """
    index = tl.arange(0, ROWS * COLUMNS)
    if WHOLE:
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
def _span(
    span, left, column, W, STEP: tl.constexpr, SPAN: tl.constexpr, REACH: tl.constexpr,
    WHOLE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of STEP rows of a window: rows, and columns from the tile's first; which columns
    there are; and how far a tile's are from them.

    The window begins REACH before its tile, or with the grid where WHOLE.
    """
    reach: tl.constexpr = 0 if WHOLE else REACH
    index = tl.arange(0, STEP * SPAN)
    others = span * SPAN + index % SPAN - reach
    present = (left + others >= 0) & (left + others < W)
    if not WHOLE:
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
def _store(base, token, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Writes (tokens, PADDED) to the tokens of a contiguous (B, H, W, N, WIDTH)."""
    offsets, mask = _channels(token * WIDTH, inside, WIDTH, PADDED)
    tl.store(base + offsets, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _quotient(numerator, denominator, dtype: tl.constexpr):
    """numerator/denominator, and 0 where the latter counts as 0, as `safe_divide`; they broadcast.

    A GPU divides by a reciprocal, and up to two bits are wrong, which is nothing to half-precision
    inputs; for dtype float32 it is the nearest number, as in PyTorch: ∂o·v − ∂o·o may be all but 0.
    """
    empty = tl.abs(denominator) < SMALLEST
    denominator = tl.where(empty, 1.0, denominator)
    if dtype == tl.float32:
        return tl.where(empty, 0.0, tl.div_rn(numerator, denominator))
    else:
        return tl.where(empty, 0.0, numerator * (1.0 / denominator))


@triton.jit
def _inverse(denominator, dtype: tl.constexpr):
    """1/denominator, and 0 where it counts as 0, as `_quotient`."""
    return _quotient(tl.full(denominator.shape, 1.0, tl.float32), denominator, dtype)


@triton.jit
def _parts(x, dtype: tl.constexpr):
    """x = high + low for a float32 x that is to meet inputs of a half-precision type.

    The high part keeps the bits that bfloat16 (8) or tf32 (11) hold, the low part is the remainder.
    """
    kept: tl.constexpr = -65536 if dtype == tl.bfloat16 else -8192
    high = (x.to(tl.int32, bitcast=True) & kept).to(tl.float32, bitcast=True)
    low = x - high
    if dtype == tl.bfloat16:
        high, low = high.to(tl.bfloat16), low.to(tl.bfloat16)
    return high, low


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
    elif SPLIT:
        high, low = _parts(x, inputs.dtype)
        exact = inputs.to(high.dtype)
        total = tl.dot(high, exact, total, input_precision="tf32")
        total = tl.dot(low, exact, total, input_precision="tf32")
    elif inputs.dtype == tl.bfloat16:
        total = tl.dot(x.to(tl.bfloat16), inputs, total)
    else:  # to the nearest number of tf32: the cores would drop the last bits
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        total = tl.dot(rounded, inputs.to(tl.float32), total, input_precision="tf32")
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


def _parts_of(whole: int, part: int) -> int:
    """How many parts make up at least a whole."""
    return -(-whole // part)


def _power_of_two(x: int) -> int:
    """The next, or x itself."""
    return 1 << (x - 1).bit_length()


def _padded(width: int) -> int:
    """A width that tensor cores take."""
    return max(16, _power_of_two(width))
