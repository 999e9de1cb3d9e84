"""The far sum again, as a kernel in Gluon, for bfloat16 and 32 channels: S = Σ_j φk_j [v_j, 1]ᵀ.

`far_triton.state_kernel` loads a block of tokens, waits, multiplies, and begins again. Here the
next block is on its way to shared memory meanwhile, past the cache, whose size limited the other.
Gluon is experimental, and not interpreted on a CPU. This module imports triton.
"""

# Kernels have no types to declare, and Triton's tuples no unpacking.
# mypy: allow-untyped-defs, disable-error-code="assignment, no-untyped-call"
# ruff: noqa: SIM102

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents

from ripple_attention.ops.launch import launch, overlaps
from ripple_attention.ops.slab_parts_gluon import COPIED, QUARTERS, WIDTH, _slabs, barrier, copies

TOKENS = 128  # at once


@gluon.jit
def _copy_tokens(into, base, stride, first, count):
    """Starts to copy 128 tokens, from `first` on, zero where there are none."""
    index = first + gl.arange(0, 128, gl.SliceLayout(1, COPIED))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, COPIED))[None, :]
    at = base + (index.to(gl.int64) * stride)[:, None] + channel
    async_copy.async_copy_global_to_shared(into, at, mask=(index < count)[:, None])


@gluon.jit
def sum_kernel(
    first, k, v, partial, k_strides, v_strides, tokens, chunks, N: gl.constexpr,
    BLOCKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """One chunk's share of the sum over an image, transposed: (E+1, M), as `state_kernel`."""
    if OVERLAP:
        gdc_launch_dependents()
    b, n = (first + gl.program_id(2)).to(gl.int64), gl.program_id(0).to(gl.int64)
    chunk = gl.program_id(1).to(gl.int64)
    start = chunk * (BLOCKS * 128)
    left = gl.minimum(tokens - start, BLOCKS * 128).to(gl.int32)  # of this chunk
    k += b * k_strides[0] + n * k_strides[3] + start * k_strides[2]
    v += b * v_strides[0] + n * v_strides[3] + start * v_strides[2]
    slabs: gl.constexpr = 8 if BLOCKS > 1 else 4
    keys, key_blocks = _slabs(slabs)
    values, value_blocks = _slabs(slabs)
    _copy_tokens(key_blocks.index(0), k, k_strides[2], 0, left)
    _copy_tokens(value_blocks.index(0), v, v_strides[2], 0, left)
    async_copy.commit_group()
    total = gl.zeros((WIDTH, WIDTH), gl.float32, QUARTERS)
    of_ones = total
    one = gl.full((WIDTH, 32), 1.0, gl.bfloat16, gl.DotOperandLayout(0, QUARTERS, 2))
    for block in range(BLOCKS):
        async_copy.wait_group(0)
        barrier()  # all has come, and none reads any more what is copied next
        if BLOCKS > 1:
            if block < BLOCKS - 1:
                slot = (block + 1) % 2
                _copy_tokens(key_blocks.index(slot), k, k_strides[2], (block + 1) * 128, left)
                _copy_tokens(value_blocks.index(slot), v, v_strides[2], (block + 1) * 128, left)
        async_copy.commit_group()
        for part in gl.static_range(4):
            slab = block % 2 * 4 + part
            key = keys.index(slab).load(gl.DotOperandLayout(1, QUARTERS, 2))
            value = values.index(slab).permute((1, 0)).load(gl.DotOperandLayout(0, QUARTERS, 2))
            total = mma_v2(value, key, total)
            of_ones = mma_v2(one, key, of_ones)  # 32 times the same
    row = gl.arange(0, WIDTH, gl.SliceLayout(1, QUARTERS))[:, None]
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, QUARTERS))[None, :]
    partial += ((b * N + n) * chunks + chunk) * ((WIDTH + 1) * WIDTH)
    gl.store(partial + row * WIDTH + channel, total)
    gl.store(partial + (WIDTH + row) * WIDTH + channel, of_ones, mask=(row < 1) & (channel < WIDTH))


def serves(k: Tensor, v: Tensor) -> bool:
    """Whether the kernel is for such keys and values: rows follow each other as columns do."""
    return copies(k, v) and all(x.stride(1) == x.shape[2] * x.stride(2) for x in (k, v))


def launch_sums(k: Tensor, v: Tensor, partial: Tensor, blocks: int) -> None:
    """The shares of chunks of so many times TOKENS: partial is (B, N, chunks, E+1, M)."""
    B, H, W, N, _ = v.shape
    chunks = partial.shape[2]
    launch(
        sum_kernel, (N, chunks, B), k, v, partial, k.stride(), v.stride(), H * W, chunks,
        N, blocks, overlaps(), num_warps=4,
    )  # fmt: skip
