"""Linear attention as Triton kernels: the far part of `ops/tiled_triton.py` by itself.

out_i = φq_iᵀ S' ÷ (φq_iᵀ s + eps),   S = [S', s] = Σ_j φk_j [v_j, 1]ᵀ
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ripple_attention.ops.kernels.common import (
    _chunk,
    _dense_channels,
    _inverse,
    _load,
    _offsets,
    _padded,
    _quotient,
    _store,
    _token,
)
from ripple_attention.ops.kernels.far import _load_sums, _sum_chunks, _sum_state, _times_state
from ripple_attention.ops.kernels.launch import launch

TOKENS_AT_ONCE = 64


@triton.jit
def linear_kernel(
    first, q, state, out, denominator, q_strides, H, W, eps, N: tl.constexpr, M: tl.constexpr,
    E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Output and denominator + eps of a block of queries."""
    b, n, block = _chunk(first, N)
    index = block * TOKENS + tl.arange(0, TOKENS)
    row, column = index // W, index % W
    inside = row < H
    q += b * q_strides[0] + n * q_strides[3]
    query = _load(q, _offsets(row, column, q_strides, True), inside, M, PADDED_M)
    sums, ones = _load_sums(state, b * N + n, M, E, PADDED_M, PADDED_E)
    numerator = _times_state(query, tl.trans(sums))
    result = tl.sum(query.to(tl.float32) * ones[None, :], 1) + eps
    quotient = _quotient(numerator, result[:, None], query.dtype)
    token = _token(b, n, row, column, H, W, N, True)
    _store(out, token * E, inside, quotient, E, PADDED_E)
    tl.store(denominator + token, result, mask=inside)


@triton.jit
def linear_query_gradient_kernel(
    first, grad, out, denominator, state, delta, inverse, grad_q, grad_strides, H, W,
    N: tl.constexpr, M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr,
    PADDED_E: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """∂φq_i = (S' ∂o_i − δ_i s)/den_i; and δ_i = ∂o_i·o_i and 1/den_i."""
    b, n, block = _chunk(first, N)
    index = block * TOKENS + tl.arange(0, TOKENS)
    row, column = index // W, index % W
    inside = row < H
    token = _token(b, n, row, column, H, W, N, True)
    grad += b * grad_strides[0] + n * grad_strides[3]
    upstream = _load(grad, _offsets(row, column, grad_strides, True), inside, E, PADDED_E)
    result = _load(out, token * E, inside, E, PADDED_E)
    projection = tl.sum(upstream.to(tl.float32) * result.to(tl.float32), 1)
    scale = tl.load(denominator + token, mask=inside, other=0.0)
    scale = _inverse(scale, upstream.dtype)
    sums, ones = _load_sums(state, b * N + n, M, E, PADDED_M, PADDED_E)
    pull = _times_state(upstream, sums) - projection[:, None] * ones[None, :]
    _store(grad_q, token * M, inside, scale[:, None] * pull, M, PADDED_M)
    tl.store(delta + token, projection, mask=inside)
    tl.store(inverse + token, scale, mask=inside)


@triton.jit
def linear_key_gradient_kernel(
    first, k, v, state, grad_k, grad_v, k_strides, v_strides, H, W, N: tl.constexpr,
    M: tl.constexpr, E: tl.constexpr, PADDED_M: tl.constexpr, PADDED_E: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """∂φk_j = T [v_j, 1] and ∂v_j = T'ᵀ φk_j, where T = [T', t] = Σ_i φq_i [∂o_i, −δ_i]ᵀ/den_i."""
    b, n, block = _chunk(first, N)
    index = block * TOKENS + tl.arange(0, TOKENS)
    row, column = index // W, index % W
    inside = row < H
    k += b * k_strides[0] + n * k_strides[3]
    v += b * v_strides[0] + n * v_strides[3]
    key = _load(k, _offsets(row, column, k_strides, True), inside, M, PADDED_M)
    value = _load(v, _offsets(row, column, v_strides, True), inside, E, PADDED_E)
    sums, ones = _load_sums(state, b * N + n, M, E, PADDED_M, PADDED_E)
    token = _token(b, n, row, column, H, W, N, True)
    _store(grad_k, token * M, inside, _times_state(value, sums) + ones[None, :], M, PADDED_M)
    _store(grad_v, token * E, inside, _times_state(key, tl.trans(sums)), E, PADDED_E)


def linear_triton_forward(q: Tensor, partial: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Linear attention of mapped queries to keys and values that are summed.

    Args:
        q: φ(q) (B, H, W, N, M), channels next to each other.
        partial: Shares of chunks in Sᵀ, (B, N, chunks, E+1, M), as `qkv_features` has them.
        eps: Added to the denominator.

    Returns:
        The output (B, H, W, N, E) in the type of q; denominators + eps in float32; and Sᵀ
        (B, N, E+1, M), in float32.
    """
    (B, H, W, N, M), E = q.shape, partial.shape[3] - 1
    out = q.new_empty(B, H, W, N, E)
    denominator = q.new_empty(B, H, W, N, dtype=torch.float32)
    blocks = triton.cdiv(H * W, TOKENS_AT_ONCE)
    with torch.cuda.device_of(q):
        state = _sum_state(partial)
        launch(
            linear_kernel, (N, blocks, B), q, state, out, denominator, q.stride(), H, W, eps,
            N, M, E, _padded(M), _padded(E), TOKENS_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return out, denominator, state


def linear_triton_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    denominator: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for φ(q), φ(k) and v, in the types of these; v (B, H, W, N, E) of any strides."""
    grad, v = _dense_channels(grad), _dense_channels(v)
    B, H, W, N, M = q.shape
    E = v.shape[-1]
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    delta, inverse = torch.empty_like(denominator), torch.empty_like(denominator)
    blocks = triton.cdiv(H * W, TOKENS_AT_ONCE)
    sizes = (H, W, N, M, E, _padded(M), _padded(E), TOKENS_AT_ONCE)
    with torch.cuda.device_of(v):
        launch(
            linear_query_gradient_kernel, (N, blocks, B),
            grad, out, denominator, state, delta, inverse, grads[0], grad.stride(), *sizes,
            num_warps=4,
        )  # fmt: skip
        ones = denominator.new_ones(1).expand(B, H, W, N, 1)
        back = _sum_state(_sum_chunks(q, grad, ones, delta, inverse))
        launch(
            linear_key_gradient_kernel, (N, blocks, B),
            k, v, back, grads[1], grads[2], k.stride(), v.stride(), *sizes, num_warps=4,
        )  # fmt: skip
    return grads[0], grads[1], grads[2]
