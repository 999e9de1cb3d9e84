"""Feature maps of a block of tokens, and their gradients, as parts of kernels.

    φ(x) = activation(A b(x̂) + c),    b(x̂) = [sin(W₁x̂); cos(W₁x̂)], or x̂ itself

x̂ is x in the length that `FeatureMap.scale` gives it. What a map does not have is None: the
`learned` map has all of it and a ReLU, `t2r` no sines, `hedgehog` no c either and a softmax, `elu`
and `relu` their activation alone. The length is a factor on products, W₁x̂ = scale·W₁x, which take
x as it is, and so exactly. `qkv_features` says how precisely all this is done.
This module imports triton: import it where it is used.
"""

# Tuples of tensors grow by +, the only way that Triton reads.
# ruff: noqa: RUF005

import triton
import triton.language as tl

from ripple_attention.ops.kernels.common import _load_matrix, _multiply, _parts, _rounded

# D and M are the widths of heads and features, PADDED_D and PADDED_M the powers of two that hold
# them: padded rows and columns of the parameters are zero, and so are their gradients. PER_HEAD:
# each head has its own A and c. ANGLES: whether there are sines.
# fmt: off


@triton.jit
def _load_map(
    w1, matrix, bias, n, piece: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_M: tl.constexpr, PIECES: tl.constexpr, PER_HEAD: tl.constexpr,
    DTYPE: tl.constexpr, ANGLE_PARTS: tl.constexpr,
):
    """W₁ᵀ (D, D), and Aᵀ (D, M) in one piece, or in those of the sines and of the cosines; each in
    parts. And c (M,). Of what is None, nothing, and zeros. PIECES: of D/PIECES sines, one of so
    many pieces of W₁'s rows and A's columns."""
    maps = ()
    width: tl.constexpr = PADDED_D // PIECES
    first: tl.constexpr = piece * width
    present: tl.constexpr = D - first if D - first < width else width
    if w1 is not None:
        angles = tl.trans(_load_matrix(w1 + first * D, D, present, D, width, PADDED_D))
        maps = (_parts(angles, DTYPE, ANGLE_PARTS),)
    if matrix is not None:
        stride: tl.constexpr = D if w1 is None else 2 * D
        matrix += first
        if PER_HEAD:
            matrix += n * (M * stride)
        maps = maps + (_parts(
            tl.trans(_load_matrix(matrix, stride, M, present, PADDED_M, width)), DTYPE, 1),)
        if w1 is not None:
            maps = maps + (_parts(
                tl.trans(_load_matrix(matrix + D, stride, M, present, PADDED_M, width)), DTYPE, 1),)
    added = tl.zeros((PADDED_M,), tl.float32)
    if bias is not None:
        if PER_HEAD:
            bias += n * M
        feature = tl.arange(0, PADDED_M)
        added = tl.load(bias + feature, mask=feature < M, other=0.0)
    return maps, added


@triton.jit
def _sines_of(angle, BOUNDED: tl.constexpr, HARDWARE: tl.constexpr):
    """sin and cos together, to 2·10⁻⁷ while |angle| < 10⁵; HARDWARE, to 5·10⁻⁷ by special units, or
    to that and 10⁻⁷|angle| where BOUNDED, without bringing angles into one turn first."""
    magic = 12582912.0  # 1.5·2²³: adding it rounds to a whole number, which the last bits hold
    if HARDWARE:
        if not BOUNDED:
            turns = (angle * 0.15915494309189535 + magic) - magic
            angle = angle - turns * 6.28125 - turns * 1.9353071795864769e-3
        sine, cosine = tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $2; cos.approx.ftz.f32 $1, $2;", "=&f,=&f,f", [angle],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
    else:
        shifted = angle * 0.3183098861837907 + magic  # in half turns, each of which changes signs
        sign = shifted.to(tl.int32, bitcast=True) << 31
        turns = shifted - magic
        # π in three pieces, the first two of few bits, so that their products are exact.
        angle = angle - turns * 3.140625 - turns * 9.67502593994140625e-4
        angle -= turns * 1.509957990978376432e-7  # now within ±π/2
        square = angle * angle
        # Near-minimax polynomials, to 5·10⁻⁹ and 3·10⁻¹⁰ but for rounding.
        sine = (2.5997516659e-6 * square - 1.9806478903e-4) * square + 8.3330154168e-3
        sine = sine * square - 1.6666657021e-1
        sine = angle + angle * square * sine
        cosine = (-2.6074219014e-7 * square + 2.4761729943e-5) * square - 1.3888400627e-3
        cosine = (cosine * square + 4.1666640522e-2) * square - 4.9999999545e-1
        cosine = 1.0 + square * cosine
        sine = (sine.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
        cosine = (cosine.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return sine, cosine


@triton.jit
def _length(wide, factor, D: tl.constexpr, UNIT: tl.constexpr, HARDWARE: tl.constexpr):
    """scale in x̂ = scale·x, and where UNIT 1/(mean square of x); both (TOKENS,)."""
    inverse = tl.full((wide.shape[0],), 1.0, tl.float32)
    scale = factor * inverse
    if UNIT:
        mean_square = tl.sum(wide * wide, 1) / D + 1e-6  # the guard of `FeatureMap.scale`
        if HARDWARE:
            root = tl.rsqrt(mean_square)
            inverse = root * root
        else:
            inverse = 1.0 / mean_square
            root = tl.sqrt_rn(inverse)
        scale = factor * root
    return scale, inverse


@triton.jit
def _sines_of_tokens(
    x, w1_parts, scale, UNIT: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """sin and cos of W₁x̂, (TOKENS, D), and both as products take them."""
    angle = _multiply(_rounded(x, DTYPE), w1_parts, 3, False, PRECISION)
    sines = _sines_of(angle * scale[:, None], UNIT, HARDWARE)
    return sines, (_rounded(sines[0], DTYPE), _rounded(sines[1], DTYPE))


@triton.jit
def _before_activation(
    x, wide, maps, bias, scale, ANGLES: tl.constexpr, UNIT: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """z = A b(x̂) + c, (TOKENS, M)."""
    if ANGLES:
        _, taken = _sines_of_tokens(x, maps[0], scale, UNIT, DTYPE, PRECISION, HARDWARE)
        z = _multiply(taken[0], maps[1], 1, False, PRECISION) + bias[None, :]
        z = tl.dot(taken[1], maps[2][0], z, input_precision=PRECISION)
    elif len(maps) > 0:
        z = _multiply(_rounded(x, DTYPE), maps[0], 1, False, PRECISION) * scale[:, None]
        z += bias[None, :]
    else:
        z = wide * scale[:, None]
    return z


@triton.jit
def _activated(z, M: tl.constexpr, ACTIVATION: tl.constexpr):
    """φ = activation(z), (TOKENS, M); zero beyond M."""
    inside = tl.arange(0, z.shape[1])[None, :] < M
    if ACTIVATION == "relu":
        phi = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "elu":
        phi = tl.where(z > 0, z + 1.0, tl.exp(tl.minimum(z, 0.0)))
        phi = tl.where(z == z, phi, z)
        phi = tl.where(inside, phi, 0.0)
    else:  # softmax
        z = tl.where(inside, z, -float("inf"))
        phi = tl.exp(z - tl.max(z, 1)[:, None])
        phi = phi / tl.sum(phi, 1)[:, None]
    return phi


@triton.jit
def _through_activation(upstream, z, M: tl.constexpr, ACTIVATION: tl.constexpr):
    """∂z from ∂φ; of a ReLU, z may be φ itself."""
    if ACTIVATION == "relu":
        gradient = tl.where(z <= 0, 0.0, upstream)  # NaN keeps its gradient, as in PyTorch
    elif ACTIVATION == "elu":
        gradient = upstream * tl.exp(tl.minimum(z, 0.0))
    else:
        phi = _activated(z, M, ACTIVATION)
        gradient = phi * (upstream - tl.sum(phi * upstream, 1)[:, None])
    return gradient
# fmt: on
