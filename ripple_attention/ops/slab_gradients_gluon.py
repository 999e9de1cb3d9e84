"""The query's gradients by slabs; see `ops/slabs_gluon.py`, which also says what they serve.

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
    MMA,
    OF_KEYS,
    OF_QUERIES,
    RIGHT,
    ROWS,
    SHARED,
    SMALLEST,
    WIDTH,
    _add_products,
    _as_left,
    _as_right,
    _copy_sums,
    _copy_window,
    _corner_of,
    _far_across,
    _far_down,
    _in_group,
    _load_image,
    _load_tile,
    _load_weights,
    _near_and_rest,
    _place,
    _results,
    _slabs,
    _store_results,
    _tile,
    _warp,
    _weights_at,
    barrier,
)


@gluon.jit
def _fold(x):
    """(64, 32) → (64, 4): the numbers of a row that one thread holds, summed."""
    x = gl.sum(gl.sum(x.reshape((64, 2, 2, 4, 2)), 1), 1)
    return gl.sum(x, 2)


@gluon.jit
def _tile_gradient(
    grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
    grad_strides, q_strides, weight_strides, keys, values, sums, parts, b, n, top, left, first,
    far_across, H, W, N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr,
    WIDE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile, and what sums over queries take.

    The window and the sums lie in shared memory; without WHOLE they are on their way there.
    `first` slab is that of warp 0.
    """
    reach: gl.constexpr = RADII[len(RADII) - 1]
    upstream = _load_tile(grad, b, n, top, left, grad_strides, H, W, OF_QUERIES, WIDE)
    query = _load_tile(q, b, n, top, left, q_strides, H, W, OF_QUERIES, WIDE)
    at, there = _results(b, n, top, left, H, W, N, WIDE)
    result = gl.load(out + at, mask=there, other=0.0)
    projection = gl.sum(upstream.to(gl.float32) * result.to(gl.float32), 1)
    projection = gl.convert_layout(projection, ROWS, assert_trivial=True)
    of_channels = gl.convert_layout(query, MMA)
    upstream, query = _as_left(upstream, H >> 30), _as_left(query, H >> 30)
    alpha = _load_weights(weights, b, n, top, left, weight_strides, H, W, len(RADII), WIDE)
    near, rest = _near_and_rest(alpha, len(RADII))
    row, column, inside = _tile(top, left, H, W, MMA, WIDE)
    token = ((b * H + top + row) * W + left + column) * N + n
    scale = gl.load(denominator + token, mask=inside, other=0.0)
    empty = gl.abs(scale) < SMALLEST
    scale = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, scale))
    gl.store(delta + token, projection, mask=inside)
    gl.store(inverse + token, scale, mask=inside)
    slot = gl.arange(0, GROUPS, gl.SliceLayout(0, MMA))[None, :]
    of_keys = gl.zeros((64, GROUPS), gl.float32, MMA)
    for g in gl.static_range(len(RADII)):
        of_keys = gl.where(slot == g, (scale * near[g])[:, None], of_keys)
    if WHOLE:  # as they are, without a far part
        of_keys += gl.where(slot <= len(RADII), (scale * rest)[:, None], 0.0)
    gl.store(scaled + token[:, None] * GROUPS + slot, of_keys, mask=inside[:, None])

    first += _warp()
    zero = gl.zeros((64, 32), gl.float32, MMA)
    across_weight = _weights_at(far_across, near, zero, RADII)
    across_sums = zero
    gradient = zero
    minus = zero - projection[:, None]
    by_group = ()
    for _ in gl.static_range(len(RADII)):
        by_group = by_group + (_fold(zero),)
    if not WHOLE:
        async_copy.wait_group(0)
        barrier()
    for step in gl.static_range(reach + 1):
        key, value = keys.index(first + step), values.index(first + step)
        similarity = mma_v2(query, _as_right(key.load(OF_KEYS), 32), zero)
        pull = mma_v2(upstream, _as_right(value.load(OF_KEYS), 32), minus)
        products = similarity * pull
        far_down = _far_down(step, reach)
        by_row = far_down >= far_across  # the distance is of rows, else of columns
        across_sums += gl.where(by_row, 0.0, products)
        products = gl.where(by_row, products, 0.0)
        more = ()
        for g in gl.static_range(len(RADII)):
            members = _in_group(far_down, g, RADII)
            # −0 adds nothing, and the compiler knows.
            more = more + (by_group[g] + _fold(gl.where(members, products, -0.0)),)
        by_group = more
        pull = pull * gl.where(by_row, _weights_at(far_down, near, zero, RADII), across_weight)
        gradient = _add_products(pull, key.load(RIGHT), gradient, WHOLE)

    if WHOLE:  # sums are transposed, else their rows are in the order of the product
        far = mma_v2(upstream, _as_right(sums.index(1).load(OF_KEYS), 32), zero)
        far = mma_v2(upstream, _as_right(sums.index(0).load(OF_KEYS), 32), far)
    else:
        far = mma_v2(upstream, sums.index(1).load(RIGHT), zero)
        far = mma_v2(upstream, sums.index(0).load(RIGHT), far)
    far -= projection[:, None] * gl.sum(parts.load(MMA).to(gl.float32), 0)[None, :]
    gradient += rest[:, None] * far
    _store_results(grad_q, scale[:, None] * gradient, b, n, top, left, H, W, N, WIDE)
    whole = gl.sum(of_channels.to(gl.float32) * far, 1)
    at = grad_weights + token * (len(RADII) + 1)
    for g in gl.static_range(len(RADII)):
        members = _in_group(far_across, g, RADII)
        total = gl.sum(by_group[g] + _fold(gl.where(members, across_sums, 0.0)), 1)
        total = gl.convert_layout(total, ROWS)
        whole -= total
        gl.store(at + g, (scale * total).to(grad_weights.dtype.element_ty), mask=inside)
    at = at + len(RADII)
    gl.store(at, (scale * whole).to(grad_weights.dtype.element_ty), mask=inside)


@gluon.jit
def slab_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, state, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """∂φq and ∂α of a tile of 8×8 queries, and what sums over queries take, as
    `tiled_triton.query_gradient_kernel`; GROUPS is the width of `scaled`."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    b, n, i, j = _place(first, N, WIDE)
    top, left = i * 8, j * 8
    keys, key_quads = _slabs(8)
    values, value_quads = _slabs(8)
    sums = gl.allocate_shared_memory(gl.bfloat16, [2, 32, WIDTH], SHARED)
    parts = gl.allocate_shared_memory(gl.bfloat16, [16, WIDTH], SHARED)
    _copy_window(
        key_quads, value_quads, k, v, b, n, top, left, k_strides, v_strides, H, W, reach, 1, WIDE
    )
    _copy_sums(sums, parts, state, b * N + n, True)
    async_copy.commit_group()
    _tile_gradient(
        grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
        grad_strides, q_strides, weight_strides, keys, values, sums, parts, b, n, top, left, 0,
        _far_across(reach), H, W, N, GROUPS, RADII, WIDE, False,
    )  # fmt: skip


@gluon.jit
def image_gradient_kernel(
    first, grad, q, k, v, weights, out, denominator, delta, inverse, scaled, grad_q,
    grad_weights, grad_strides, q_strides, k_strides, v_strides, weight_strides, H, W,
    N: gl.constexpr, GROUPS: gl.constexpr, RADII: gl.constexpr, DOWN: gl.constexpr,
    ACROSS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """The same of a whole grid of DOWN × ACROSS tiles, 2 × 2 at most."""
    reach: gl.constexpr = RADII[len(RADII) - 1]
    b, n, _, _ = _place(first, N, WIDE)
    keys, values, sums, parts = _load_image(
        k, v, b, n, k_strides, v_strides, H, W, reach, DOWN, WIDE, True
    )
    for tile in range(DOWN * ACROSS):
        top, left = _corner_of(tile, b, ACROSS)
        _tile_gradient(
            grad, q, weights, out, denominator, delta, inverse, scaled, grad_q, grad_weights,
            grad_strides, q_strides, weight_strides, keys, values, sums, parts, b, n, top, left,
            tile // ACROSS * 4, _far_across(left), H, W, N, GROUPS, RADII, WIDE, True,
        )  # fmt: skip


def launch_slab_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, spatial_weights: Tensor, out: Tensor,
    denominator: Tensor, cut: Tensor, results: tuple[Tensor, ...], radii: list[int], wide: bool,
) -> None:  # fmt: skip
    """The query's part of `tiled_triton_backward`: δ, 1/den, scaled weights, ∂φq and ∂α."""
    B, H, W, N, _ = v.shape
    inputs = grad, q, k, v, spatial_weights
    strides, groups = [x.stride() for x in inputs], results[2].shape[-1]
    if cut.numel() == 0:
        launch(
            image_gradient_kernel, (N, 1, B), *inputs, out, denominator, *results, *strides, H, W,
            N, groups, tuple(radii), _parts_of(H, 8), _parts_of(W, 8), wide,
            num_warps=4, maxnreg=255,
        )  # fmt: skip
    else:
        launch(
            slab_gradient_kernel, (N * _parts_of(W, 8), _parts_of(H, 8), B),
            *inputs, out, denominator, cut, *results, *strides, H, W,
            N, groups, tuple(radii), wide, num_warps=4, maxnreg=128,
        )  # fmt: skip
