"""The key's gradients of a whole grid, in Gluon; see `ops/slabs_gluon.py`.

A program copies the queries of an image, their gradients and scaled weights to shared memory once,
and all its keys meet them. What a pair weighs is known by its query and its distance. Each thread
of a product has eight queries and, of each, one of eight slots for weights; those of the others
are a shuffle away, as the group of a pair says. In Triton's own words (`tl.gather`) the same takes
twice the shuffles and more, to bring weights to where products have their pairs. Tiles of keys that
lie side by side take what they read of the queries together, as shared memory is the limit.

Gluon is experimental, and not interpreted on a CPU. This module imports triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code="assignment, no-untyped-call"
# ruff: noqa: RUF005

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ripple_attention.ops.kernel_parts import _parts_of
from ripple_attention.ops.launch import launch
from ripple_attention.ops.slab_parts_gluon import (
    COPIED,
    MMA,
    OF_KEYS,
    OF_QUERIES,
    RIGHT,
    _add_products,
    _as_left,
    _as_right,
    _copy_rows,
    _far_across,
    _load_tile,
    _place,
    _slabs,
    _store_results,
    barrier,
)

SLOTS = gl.constexpr(8)  # for the weights of a query, one for each thread of a column of products
# (64, 32) as products have it, (8, 8, 32); and slots of 32 queries, which all eight rows share.
EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [1, 0, 0], [0, 0, 8], [0, 0, 16]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[2, 0, 0], [4, 0, 0]],
        [],
        [8, 8, 32],
    )
)
OF_SLOTS = gl.constexpr(gl.SliceLayout(0, EIGHTS))
COPIED_SLOTS = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _tokens(quad: gl.constexpr, b, n, H, W, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Numbers of the 128 tokens of eight rows of 16, and which there are."""
    index = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    row, column = 8 * quad + index // 16, index % 16
    return ((b * H + row) * W + column) * N + n, (row < H) & (column < W)


@gluon.jit
def _group_of(distance, RADII: gl.constexpr):
    """The group of each distance, counted from 0."""
    if RADII[len(RADII) - 1] == len(RADII) - 1:  # one distance a group
        return gl.minimum(distance, len(RADII))
    else:
        group = distance * 0
        for g in gl.static_range(len(RADII)):
            group += (distance > RADII[g]).to(gl.int32)
        return group


@gluon.jit
def _from_lane(x, lane):
    """What another thread of the warp has of slots, (SLOTS, 32), in the same column: (64, 32).

    All threads must come here: the compiler does not know that a shuffle needs them.
    """
    lane = gl.convert_layout(lane.reshape((8, 8, 32)), EIGHTS, assert_trivial=True)
    found = gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [x[None, :, :], lane],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.convert_layout(found.reshape((64, 32)), MMA, assert_trivial=True)


@gluon.jit
def image_key_kernel(
    first, grad, q, k, v, scaled, delta, grad_k, grad_v, grad_strides, q_strides, k_strides,
    v_strides, H, W, N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr,
    DOWN: gl.constexpr, ACROSS: gl.constexpr, SLABS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """∂φk and ∂v of a whole grid of DOWN × ACROSS tiles of keys, 2 × 2 at most, as
    `tiled_triton.key_gradient_kernel`; GROUPS is the width of `scaled`, SLABS half of the rows."""
    b, n, _, _ = _place(first, N, WIDE)
    queries, query_quads = _slabs(4 * DOWN)
    upstream, upstream_quads = _slabs(4 * DOWN)
    slots = gl.allocate_shared_memory(gl.float32, [4 * DOWN, 32, SLOTS], PLAIN)
    slot_quads = slots._reinterpret(gl.float32, [DOWN, 128, SLOTS], PLAIN)
    projections = gl.allocate_shared_memory(gl.float32, [4 * DOWN, 32], LINE)
    projection_quads = projections._reinterpret(gl.float32, [DOWN, 128], LINE)
    for quad in gl.static_range(DOWN):
        _copy_rows(
            query_quads, upstream_quads, q, grad, b, n, b * 0 + 8 * quad, 0, q_strides,
            grad_strides, H, W, quad, 16, 0, WIDE,
        )  # fmt: skip
        token, there = _tokens(quad, b, n, H, W, N, COPIED_SLOTS)
        slot = gl.arange(0, SLOTS, gl.SliceLayout(0, COPIED_SLOTS))[None, :]
        at = scaled + (token[:, None] * GROUPS + slot)
        mask = there[:, None] & (slot < GROUPS)
        async_copy.async_copy_global_to_shared(slot_quads.index(quad), at, mask=mask)
        token, there = _tokens(quad, b, n, H, W, N, COPIED)
        projection_quads.index(quad).store(gl.load(delta + token, mask=there, other=0.0))
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()

    key_row = gl.arange(0, 64, gl.SliceLayout(1, MMA))[:, None] // 8
    column = gl.arange(0, 32, gl.SliceLayout(0, MMA))[None, :]
    query_row, thread = column // 16, column // 2 % 4  # which of the four that share a row
    zero = gl.zeros((64, 32), gl.float32, MMA)
    for down in range(DOWN):
        top = b * 0 + 8 * down
        keys, values, lanes, key_gradients, value_gradients = (), (), (), (), ()
        for across in gl.static_range(ACROSS):
            key = _load_tile(k, b, n, top, 8 * across, k_strides, H, W, OF_QUERIES, WIDE)
            value = _load_tile(v, b, n, top, 8 * across, v_strides, H, W, OF_QUERIES, WIDE)
            keys = keys + (_as_left(key, H >> 30),)
            values = values + (_as_left(value, H >> 30),)
            lanes = lanes + (_group_of(_far_across(8 * across), RADII) * 4 + thread,)
            key_gradients, value_gradients = key_gradients + (zero,), value_gradients + (zero,)
        for slab in gl.static_range(SLABS):
            query, above = queries.index(slab), upstream.index(slab)
            far_down = gl.abs(key_row - query_row + (8 * down - 2 * slab))
            lane_down = _group_of(far_down, RADII) * 4 + thread
            held = slots.index(slab).permute((1, 0)).load(OF_SLOTS)
            minus = zero - projections.index(slab).load(gl.SliceLayout(0, MMA))[None, :]
            to_meet, above_to_meet = query.load(OF_KEYS), above.load(OF_KEYS)
            to_add, above_to_add = query.load(RIGHT), above.load(RIGHT)
            of_keys, of_values = (), ()
            for across in gl.static_range(ACROSS):
                # Groups grow with distance: that of the larger is the larger of the groups.
                weight = _from_lane(held, gl.maximum(lane_down, lanes[across]))
                pull = mma_v2(values[across], _as_right(above_to_meet, 32), minus) * weight
                similarity = mma_v2(keys[across], _as_right(to_meet, 32), zero) * weight
                gradient = _add_products(pull, to_add, key_gradients[across], False)
                of_keys = of_keys + (gradient,)
                gradient = _add_products(similarity, above_to_add, value_gradients[across], False)
                of_values = of_values + (gradient,)
            key_gradients, value_gradients = of_keys, of_values
        for across in gl.static_range(ACROSS):
            left = 8 * across
            _store_results(grad_k, key_gradients[across], b, n, top, left, H, W, N, WIDE)
            _store_results(grad_v, value_gradients[across], b, n, top, left, H, W, N, WIDE)


def launch_image_keys(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scaled: Tensor, delta: Tensor, grad_k: Tensor,
    grad_v: Tensor, radii: list[int], wide: bool,
) -> None:  # fmt: skip
    """The key's part of `tiled_triton_backward` for a grid that is one window: ∂φk and ∂v."""
    B, H, W, N, _ = v.shape
    strides = [x.stride() for x in (grad, q, k, v)]
    launch(
        image_key_kernel, (N, 1, B), grad, q, k, v, scaled, delta, grad_k, grad_v, *strides, H, W,
        N, scaled.shape[-1], tuple(radii), _parts_of(H, 8), _parts_of(W, 8), _parts_of(H, 2), wide,
        num_warps=4, maxnreg=255,
    )  # fmt: skip
