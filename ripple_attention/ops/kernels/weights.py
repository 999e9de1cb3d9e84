"""Spatial weights of a block of tokens, and their gradients, as parts of kernels.

    o_g = ⟨P v + p, e_g⟩ = ⟨v, Pᵀe_g⟩ + ⟨p, e_g⟩,    α = a stick broken by o, or softmax o

One vector for each head and logit, and P costs no token anything. Groups stand side by side in a
matrix (TOKENS, PADDED_G): sums over the groups before or after one are products with a triangle.
This module imports triton: import it where it is used.
"""

# Tuples of tensors grow by +, the only way that Triton reads.

import triton
import triton.language as tl

from ripple_attention.ops.kernels.common import _load_matrix, _multiply, _parts, _rounded

# G groups have LOGITS logits: one for each of them, or for all but the rest where STICKS. BALANCED:
# log(G−1−g) is taken from each. TRUNCATED: the rest weighs nothing.
# fmt: off


@triton.jit
def _load_logits(
    embedding, proj_w, proj_b, n, LOGITS: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
    PADDED_G: tl.constexpr, BALANCED: tl.constexpr, DTYPE: tl.constexpr,
):
    """Of each logit of head n the vector Pᵀe_g, (PADDED_G, D), all its bits in parts, and the
    number that is added, (PADDED_G,)."""
    row, channel = tl.arange(0, PADDED_G), tl.arange(0, PADDED_D)
    embeddings = _load_matrix(embedding + n * (LOGITS * D), D, LOGITS, D, PADDED_G, PADDED_D)
    matrix = _load_matrix(proj_w, D, D, D, PADDED_D, PADDED_D)
    vectors = tl.dot(embeddings, matrix, input_precision="ieee")
    bias = tl.load(proj_b + channel, mask=channel < D, other=0.0)
    constants = tl.sum(embeddings * bias[None, :], 1)
    if BALANCED:
        constants -= tl.log(tl.maximum(LOGITS - row, 1).to(tl.float32))
    return _parts(vectors, DTYPE, 3), constants


@triton.jit
def _sigmoids(logit, HARDWARE: tl.constexpr):
    """σ(logit) and σ(−logit), both as precise as they are small; and log σ(−logit)."""
    if HARDWARE:
        small, large, log = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $3; add.f32 $1, $0, 0f3F800000; lg2.approx.ftz.f32 $2, $1;"
            "rcp.approx.ftz.f32 $1, $1;", "=&f,=&f,=&f,f", [-1.4426950408889634 * tl.abs(logit)],
            dtype=(tl.float32, tl.float32, tl.float32), is_pure=True, pack=1)
        log *= 0.6931471805599453
    else:
        small = tl.exp(-tl.abs(logit))
        large = 1.0 / (1.0 + small)
        whole = 1.0 + small  # its logarithm, times what rounding did to the small part
        ratio = small / tl.where(whole == 1.0, 1.0, whole - 1.0)
        log = tl.where(whole == 1.0, small, tl.log(whole) * ratio)
    small *= large
    up = logit >= 0
    return tl.where(up, large, small), tl.where(up, small, large), -log - tl.maximum(logit, 0.0)


@triton.jit
def _before(x):
    """Of each group the sum of x over the groups before it."""
    row, column = tl.arange(0, x.shape[1])[:, None], tl.arange(0, x.shape[1])[None, :]
    return tl.dot(x, (row < column).to(tl.float32), input_precision="ieee")


@triton.jit
def _after(x):
    """Of each group the sum of x over the groups after it."""
    row, column = tl.arange(0, x.shape[1])[:, None], tl.arange(0, x.shape[1])[None, :]
    return tl.dot(x, (row > column).to(tl.float32), input_precision="ieee")


@triton.jit
def _break_stick(logit, threshold, G: tl.constexpr, HARDWARE: tl.constexpr):
    """s_g and 1−s_g; α before halting; which groups are merged; what each of those weighs, and
    1/(how many they are), (TOKENS, 1). A group is merged if less than the threshold is left before
    it; group 0 never is."""
    group = tl.arange(0, logit.shape[1])[None, :]
    stick, other, log_other = _sigmoids(logit, HARDWARE)
    stick, other = tl.where(group == G - 1, 1.0, stick), tl.where(group == G - 1, 0.0, other)
    left = tl.exp(_before(tl.where(group < G - 1, log_other, 0.0)))
    weights = tl.where(group < G, left * stick, 0.0)
    merged = (left < threshold) & (group > 0) & (group < G)
    inverse = 1.0 / tl.maximum(tl.sum(merged.to(tl.float32), 1), 1.0)[:, None]
    share = tl.max(tl.where(merged, left, 0.0), 1)[:, None] * inverse  # left before the first
    return stick, other, weights, merged, share, inverse


@triton.jit
def _logits(value, vectors, constants, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """o; NaN where it is infinite: P v is so, then, and mostly adds up ∞ − ∞."""
    logit = _multiply(_rounded(value, DTYPE), vectors, 3, True, PRECISION) + constants[None, :]
    return tl.where(tl.abs(logit) < float("inf"), logit, float("nan"))


@triton.jit
def _weights_of(
    value, vectors, constants, threshold, G: tl.constexpr, STICKS: tl.constexpr,
    TRUNCATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """α of some tokens, (TOKENS, PADDED_G)."""
    logit = _logits(value, vectors, constants, DTYPE, PRECISION)
    group = tl.arange(0, logit.shape[1])[None, :]
    if STICKS:
        _, _, weights, merged, share, _ = _break_stick(logit, threshold, G, HARDWARE)
        weights = tl.where(merged, share, weights)
        if TRUNCATED:
            weights = tl.where(group == G - 1, 0.0, weights)
    else:
        logit = tl.where(group < G, logit, -float("inf"))
        weights = tl.exp(logit - tl.max(logit, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    return weights


@triton.jit
def _logit_gradient(
    value, upstream, vectors, constants, threshold, G: tl.constexpr, STICKS: tl.constexpr,
    TRUNCATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """∂o from ∂α, (TOKENS, PADDED_G).

    Sticks: with h_g = ∂α_g, averaged over merged groups, and t_g = α_g h_g before halting,
    ∂o_g = (1−s_g) t_g − s_g Σ_{g'>g} t_g'.
    """
    group = tl.arange(0, upstream.shape[1])[None, :]
    if STICKS:
        logit = _logits(value, vectors, constants, DTYPE, PRECISION)
        stick, other, weights, merged, _, inverse = _break_stick(logit, threshold, G, HARDWARE)
        if TRUNCATED:
            upstream = tl.where(group == G - 1, 0.0, upstream)
        mean = tl.sum(tl.where(merged, upstream, 0.0), 1)[:, None] * inverse
        here = weights * tl.where(merged, mean, upstream)
        gradient = tl.where(group < G - 1, other * here - stick * _after(here), 0.0)
    else:
        weights = _weights_of(value, vectors, constants, threshold, G, STICKS, TRUNCATED, DTYPE,
                              PRECISION, HARDWARE)
        gradient = weights * (upstream - tl.sum(weights * upstream, 1)[:, None])
    return gradient
# fmt: on
