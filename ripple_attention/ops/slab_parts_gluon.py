"""What the kernels in Gluon share: layouts, slabs of rows in shared memory, and products of them.

See `ops/slabs_gluon.py`. Gluon is experimental, and not interpreted on a CPU. This module imports
triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code="assignment, no-untyped-call"
# ruff: noqa: RUF005

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # before Triton 3.7

WIDTH = gl.constexpr(32)  # of features and of values
SMALLEST = gl.constexpr(torch.finfo(torch.float32).tiny)  # of `safe_divide`
ROUNDING = gl.constexpr(16 * torch.finfo(torch.float32).eps)  # of `settle`

# Layouts. Of products: warp w has rows 16w to 16w + 15. Of sums over tokens: a quarter a warp.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA))
QUARTERS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
# Of 16 bytes a thread: the queries of a warp, and keys, or values, that all warps hold.
OF_QUERIES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)
OF_KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [16, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [32, 32],
    )
)
OF_ONES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0]],
        [],
        [16, 32],
    )
)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))


@gluon.jit
def _corner(base, b, n, row, column, strides):
    return base + (b * strides[0] + n * strides[3] + row * strides[1] + column * strides[2])


@gluon.jit
def _in_group(distance, g: gl.constexpr, RADII: gl.constexpr):
    """Which distances belong to group g, not the last."""
    if g == 0:
        return distance <= RADII[0]
    else:
        return (distance > RADII[g - 1]) & (distance <= RADII[g])


@gluon.jit
def _weights_at(distance, near, beyond, RADII: gl.constexpr):
    """The weight at each distance, (queries, keys)."""
    weight = beyond
    for g in gl.static_range(len(RADII)):
        weight = gl.where(_in_group(distance, g, RADII), near[g][:, None], weight)
    return weight


@gluon.jit
def _place(first, N: gl.constexpr, WIDE: gl.constexpr):
    """Batch, head, and the numbers of a program's first tile, down and across."""
    across = gl.program_id(0)
    b, n, i, j = first + gl.program_id(2), across % N, gl.program_id(1), across // N
    if WIDE:
        b, n, i, j = b.to(gl.int64), n.to(gl.int64), i.to(gl.int64), j.to(gl.int64)
    return b, n, i, j


@gluon.jit
def _warp():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _slot(slab, RING: gl.constexpr):
    """Where a slab lies that is not two rings ahead; without a ring, where its number says."""
    if RING == 0:
        return slab
    else:
        return gl.where(slab >= RING, slab - RING, slab)


@gluon.jit
def _slabs(COUNT: gl.constexpr):
    """Shared memory for slabs, one by one and by four."""
    slabs = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 32, WIDTH], SHARED)
    return slabs, slabs._reinterpret(gl.bfloat16, [COUNT // 4, 128, WIDTH], SHARED)


@gluon.jit
def _quad(left, W, END: gl.constexpr, SHIFT: gl.constexpr, WIDE: gl.constexpr):
    """The tokens of four slabs, two rows of 16 each, from column left − SHIFT on: row and column,
    from the first row and from `left`; and which columns there are and are asked for, up to END."""
    index = gl.arange(0, 128, gl.SliceLayout(1, COPIED))
    row, column = index // 16, index % 16 - SHIFT
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    return row, column, (left + column >= 0) & (left + column < W) & (column < END)


@gluon.jit
def _copy_quad(into, base, row, column, there, strides):
    """Starts to copy four slabs to shared memory, zero where there are no tokens."""
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    at = (row * strides[1] + column * strides[2])[:, None] + channel
    async_copy.async_copy_global_to_shared(into, base + at, mask=there[:, None])


@gluon.jit
def _copy_rows(
    keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, slot, END: gl.constexpr,
    SHIFT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Starts to copy eight rows of keys and of values, from `top` on, to the four slabs `slot`."""
    row, column, present = _quad(left, W, END, SHIFT, WIDE)
    there = present & (top + row >= 0) & (top + row < H)
    k_at = _corner(k, b, n, top, left, k_strides)
    v_at = _corner(v, b, n, top, left, v_strides)
    _copy_quad(keys.index(slot), k_at, row, column, there, k_strides)
    _copy_quad(values.index(slot), v_at, row, column, there, v_strides)


@gluon.jit
def _copy_sums(sums, ones, state, head, REORDER: gl.constexpr):
    """Starts to copy the parts of a head's far sums: high and low, (2, 32, WIDTH), and the three of
    the sum that belongs to ones, (16, WIDTH).

    REORDER: rows, which are values, in the order that `_as_left` gives to channels.
    """
    row = gl.arange(0, 32, gl.SliceLayout(1, COPIED))[:, None]
    part = gl.arange(0, 16, gl.SliceLayout(1, COPIED))[:, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    at = state + head * ((2 * WIDTH + 3) * WIDTH) + channel
    if REORDER:
        row = row // 2 % 4 * 8 + row // 8 * 2 + row % 2
    async_copy.async_copy_global_to_shared(sums.index(0), at + row * WIDTH)
    async_copy.async_copy_global_to_shared(sums.index(1), at + (WIDTH + row) * WIDTH)
    there = (part < 3) & (channel < WIDTH)
    async_copy.async_copy_global_to_shared(ones, at + (2 * WIDTH + part) * WIDTH, mask=there)


@gluon.jit
def _sum_slabs(keys, values, sums, ones, COUNT: gl.constexpr, FLIP: gl.constexpr):
    """The same sums, of all keys and values that lie in shared memory, where FLIP, transposed; ones
    are (32, WIDTH)."""
    total = gl.zeros((32, WIDTH), gl.float32, QUARTERS)
    of_ones = total
    one = gl.full((32, 32), 1.0, gl.bfloat16, gl.DotOperandLayout(0, QUARTERS, 2))
    for slab in gl.static_range(COUNT):
        key = keys.index(slab).load(gl.DotOperandLayout(1, QUARTERS, 2))
        value = values.index(slab).permute((1, 0)).load(gl.DotOperandLayout(0, QUARTERS, 2))
        total = mma_v2(value, key, total)
        of_ones = mma_v2(one, key, of_ones)  # 32 times the same
    high = total.to(gl.bfloat16)
    low = (total - high.to(gl.float32)).to(gl.bfloat16)
    if FLIP:
        sums.index(0).permute((1, 0)).store(high)
        sums.index(1).permute((1, 0)).store(low)
    else:
        sums.index(0).store(high)
        sums.index(1).store(low)
    row = gl.arange(0, 32, gl.SliceLayout(1, QUARTERS))[:, None]
    high = of_ones.to(gl.bfloat16).to(gl.float32)
    middle = (of_ones - high).to(gl.bfloat16).to(gl.float32)
    last = of_ones - high - middle
    parts = gl.where(row == 0, high, gl.where(row == 1, middle, gl.where(row == 2, last, 0.0)))
    ones.store(parts.to(gl.bfloat16))


@gluon.jit
def _copy_window(
    keys, values, k, v, b, n, top, left, k_strides, v_strides, H, W, REACH: gl.constexpr,
    TILES: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Starts to copy the window of a tile to the first eight slabs; if it is the first of several
    TILES, with all of their rows, which the next will need."""
    if TILES == 1:
        H = gl.minimum(H, top + (8 + REACH))
    for quad in gl.static_range(2):
        _copy_rows(
            keys, values, k, v, b, n, top - REACH + 8 * quad, left, k_strides, v_strides, H, W,
            quad, 8 + REACH, REACH, WIDE,
        )  # fmt: skip


@gluon.jit
def _load_image(
    k, v, b, n, k_strides, v_strides, H, W, REACH: gl.constexpr, DOWN: gl.constexpr,
    WIDE: gl.constexpr, FLIP: gl.constexpr,
):  # fmt: skip
    """Copies a grid of DOWN tiles, with empty rows around it, waits, and sums it.

    Returns:
        The slabs of keys and of values, and their sums, as `_sum_slabs` has them.
    """
    keys, key_quads = _slabs(4 * DOWN + 4)
    values, value_quads = _slabs(4 * DOWN + 4)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    ones = gl.allocate_shared_memory(gl.bfloat16, [32, WIDTH], SHARED)
    for quad in gl.static_range(DOWN + 1):
        _copy_rows(
            key_quads, value_quads, k, v, b, n, b * 0 + (8 * quad - REACH), 0, k_strides,
            v_strides, H, W, quad, 16, 0, WIDE,
        )  # fmt: skip
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    _sum_slabs(keys, values, sums, ones, 4 * DOWN + REACH, FLIP)
    barrier()
    return keys, values, sums, ones.slice(0, 16)


@gluon.jit
def _corner_of(tile, b, ACROSS: gl.constexpr):
    """A tile's first row and column in a whole grid, of 64 bits where b is."""
    return b * 0 + tile // ACROSS * 8, b * 0 + tile % ACROSS * 8


@gluon.jit
def _tile(top, left, H, W, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """Rows and columns of a tile's tokens, from its first; and which there are."""
    index = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    row, column = index // 8, index % 8
    inside = (top + row < H) & (left + column < W)
    if WIDE:
        row, column = row.to(gl.int64), column.to(gl.int64)
    return row, column, inside


@gluon.jit
def _load_tile(
    base, b, n, top, left, strides, H, W, LAYOUT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The channels of a tile's tokens, (64, WIDTH), zero outside the grid."""
    row, column, inside = _tile(top, left, H, W, LAYOUT, WIDE)
    at = _corner(base, b, n, top, left, strides) + (row * strides[1] + column * strides[2])
    at = at[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(at, mask=inside[:, None], other=0.0)


@gluon.jit
def _results(b, n, top, left, H, W, N: gl.constexpr, WIDE: gl.constexpr):
    """Where the channels of a tile's tokens lie in (B, H, W, N, WIDTH), and which there are."""
    row, column, inside = _tile(top, left, H, W, OF_QUERIES, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, OF_QUERIES))[None, :]
    return (token * WIDTH)[:, None] + channel, inside[:, None]


@gluon.jit
def _store_results(base, x, b, n, top, left, H, W, N: gl.constexpr, WIDE: gl.constexpr):
    """Stores x, (64, WIDTH), 16 bytes a thread."""
    at, there = _results(b, n, top, left, H, W, N, WIDE)
    gl.store(base + at, gl.convert_layout(x.to(gl.bfloat16), OF_QUERIES), mask=there)


@gluon.jit
def _load_weights(
    base, b, n, top, left, strides, H, W, COUNT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's queries, for each box and the rest; each (64,)."""
    row, column, inside = _tile(top, left, H, W, MMA, WIDE)
    at = _corner(base, b, n, top, left, strides) + (row * strides[1] + column * strides[2])
    weights = ()
    for g in gl.static_range(COUNT + 1):
        weights = weights + (gl.load(at + g * strides[4], mask=inside, other=0.0),)
    return weights


@gluon.jit
def _near_and_rest(weights, COUNT: gl.constexpr):
    """α_g − α_rest for each box, and α_rest."""
    rest = weights[COUNT].to(gl.float32)
    near = ()
    for g in gl.static_range(COUNT):
        near = near + (weights[g].to(gl.float32) - rest,)
    return near, rest


@gluon.jit
def _as_left(x, zero):
    """Queries as the left of a product over channels, which are in another order: what a thread
    loads at once is what it is to hold.

    Args:
        x: (64, WIDTH), as OF_QUERIES.
        zero: A number that is 0, which the compiler does not know: else it would put the registers
            in their order again for each product.
    """
    x = x.reshape((64, 4, 4, 2)).permute((0, 2, 1, 3)).reshape((64, WIDTH))
    x = gl.convert_layout(x, LEFT, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "or.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _as_right(x, COUNT: gl.constexpr):
    """Keys as the right of such a product, their channels in the same order."""
    x = x.reshape((COUNT, 4, 4, 2)).permute((0, 2, 1, 3)).reshape((COUNT, WIDTH))
    return gl.convert_layout(x.permute((1, 0)), RIGHT, assert_trivial=True)


@gluon.jit
def _far_across(shift):
    """How many columns queries of a tile are from the keys of a slab, (64, 32), which begin `shift`
    columns before it."""
    query = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    return gl.abs(query % 8 + shift - key % 16)


@gluon.jit
def _far_down(step: gl.constexpr, REACH: gl.constexpr):
    """How many rows the queries of a warp, which are two rows, are from those of the slab that is
    `step` behind the warp's first."""
    query = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None]
    key = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    return gl.abs(query // 8 % 2 - (key // 16 + (2 * step - REACH)))


@gluon.jit
def _halve(x):
    """(64, 32) → (64, 16): a slab's two rows, summed."""
    return gl.sum(x.reshape((64, 2, 16)), 1)


@gluon.jit
def _add_products(x, right, total, SPLIT: gl.constexpr):
    """total + x @ right; x, (64, 32), is rounded, or cut in two."""
    if SPLIT:
        high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        low = (x - high).to(gl.bfloat16)
        total = mma_v2(gl.convert_layout(low, LEFT), right, total)
        x = high
    return mma_v2(gl.convert_layout(x.to(gl.bfloat16), LEFT), right, total)


def copies(*inputs: Tensor) -> bool:
    """Whether kernels in Gluon can copy them: 16 bytes at a time, which must lie on such bounds."""
    return all(
        x.shape[-1] == WIDTH.value
        and x.dtype == torch.bfloat16
        and x.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for stride in x.stride()[:4])
        for x in inputs
    )
