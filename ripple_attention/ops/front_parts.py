"""What the kernels of the front are made of: tokens and parameters loaded and stored, products in
parts, feature maps and sticks of a block of tokens.

`front_triton` says what they compute, and how precisely. This module imports triton: import it
where it is used.
"""

# Tuples of tensors grow by +, the only way that Triton reads; kernels have no types of Python's.
# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

# D and M are the widths of heads and features, PADDED_D and PADDED_M the powers of two that hold
# them: padded rows and columns of the parameters are zero, and so are their gradients. Strides are
# those of (B, H, W, N), where rows follow each other as columns do. OFFSETS: what is taken from
# each logit, log(G−1−g) or 0; empty for no weights at all.
# fmt: off


@triton.jit
def _rows(base, strides, at):
    """Where the channels of some tokens begin, (TOKENS,)."""
    return base + at[0] * strides[0] + at[1] * strides[2] + at[3] * strides[3] + at[2] * strides[2]


@triton.jit
def _tokens(block, b, n, L, mask, mask_strides, MASKED: tl.constexpr, TOKENS: tl.constexpr):
    """Where a block of tokens stands: batch, first token, tokens from there, and head; which are in
    the image; and not padded."""
    start, index = block.to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    at = (b, start, index, n)
    inside = start + index < L
    present = inside
    if MASKED:
        present = inside & (tl.load(_rows(mask, mask_strides, at), mask=inside, other=1) == 0)
    return at, inside, present


@triton.jit
def _channels(base, strides, at, present, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Pointers to the channels of some tokens, (TOKENS, PADDED), and which of them there are."""
    channel = tl.arange(0, PADDED)[None, :]
    mask = present[:, None]
    if WIDTH != PADDED:
        mask = mask & (channel < WIDTH)
    return _rows(base, strides, at)[:, None] + channel, mask


@triton.jit
def _load(base, strides, at, present, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Channels of some tokens, zero where not present and beyond WIDTH."""
    pointers, mask = _channels(base, strides, at, present, WIDTH, PADDED)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(base, strides, at, inside, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    pointers, mask = _channels(base, strides, at, inside, WIDTH, PADDED)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _load_matrix(
    base, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED_ROWS: tl.constexpr, PADDED_COLUMNS: tl.constexpr,
):
    """A parameter (ROWS, COLUMNS) with zeros around it."""
    row, column = tl.arange(0, PADDED_ROWS), tl.arange(0, PADDED_COLUMNS)
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    return tl.load(base + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store_matrix(base, stride, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    mask = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    tl.store(base + row[:, None] * stride + column[None, :], x, mask=mask)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x as tensor cores take it. It changes no input, and no float32 where inputs are float32."""
    x = x.to(tl.bfloat16 if tl.bfloat16 == DTYPE else tl.float32)
    if tl.float16 == DTYPE:  # to the nearest number of tf32: the cores would drop the last bits
        x = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _parts(x, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    """A float32 x as a sum of COUNT parts for tensor cores, the largest first, or of x alone."""
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
def _load_map(
    w1, w2, b2, D: tl.constexpr, M: tl.constexpr, PADDED_D: tl.constexpr, PADDED_M: tl.constexpr,
    DTYPE: tl.constexpr, ANGLE_PARTS: tl.constexpr,
):
    """W₁ᵀ (D, D), W₂ᵀ (D, M) of the sines and of the cosines, each in parts; and b₂ (M,)."""
    angles = tl.trans(_load_matrix(w1, D, D, D, PADDED_D, PADDED_D))
    sines = tl.trans(_load_matrix(w2, 2 * D, M, D, PADDED_M, PADDED_D))
    cosines = tl.trans(_load_matrix(w2 + D, 2 * D, M, D, PADDED_M, PADDED_D))
    maps = _parts(angles, DTYPE, ANGLE_PARTS), _parts(sines, DTYPE, 1), _parts(cosines, DTYPE, 1)
    feature = tl.arange(0, PADDED_M)
    return maps, tl.load(b2 + feature, mask=feature < M, other=0.0)


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
def _features(
    x, maps, bias, factor, D: tl.constexpr, UNIT: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, HARDWARE: tl.constexpr,
):
    """z = W₂[sin; cos] + b₂, (TOKENS, M); sin and cos of W₁x̂, (TOKENS, D), as they are and as the
    product took them; scale in x̂ = scale·x; and 1/(mean square of x) where UNIT, (TOKENS,)."""
    wide = x.to(tl.float32)
    inverse = tl.full((x.shape[0],), 1.0, tl.float32)
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
    angle = _multiply(_rounded(x, DTYPE), maps[0], 3, False, PRECISION)
    sines = _sines_of(angle * scale[:, None], UNIT, HARDWARE)
    taken = (_rounded(sines[0], DTYPE), _rounded(sines[1], DTYPE))
    z = _multiply(taken[0], maps[1], 1, False, PRECISION) + bias[None, :]
    z = tl.dot(taken[1], maps[2][0], z, input_precision=PRECISION)
    return z, sines, taken, scale, inverse


@triton.jit
def _stick_vectors(
    embedding, proj_w, proj_b, n, D: tl.constexpr, PADDED_D: tl.constexpr, STICKS: tl.constexpr
):
    """Of each stick of head n, the vector Pᵀe_g, (D,), and the number ⟨p, e_g⟩."""
    vectors, constants = (), ()
    if STICKS > 0:
        matrix = _load_matrix(proj_w, D, D, D, PADDED_D, PADDED_D)
        channel = tl.arange(0, PADDED_D)
        bias = tl.load(proj_b + channel, mask=channel < D, other=0.0)
        for g in tl.static_range(STICKS):
            start = embedding + (n * STICKS + g) * D
            vector = tl.load(start + channel, mask=channel < D, other=0.0)
            vectors = vectors + (tl.sum(matrix * vector[:, None], 0),)
            constants = constants + (tl.sum(bias * vector, 0),)
    return vectors, constants


@triton.jit
def _sigmoids(logit, HARDWARE: tl.constexpr):
    """σ(logit) and σ(−logit), both as precise as they are small."""
    if HARDWARE:
        small, large = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $2; add.f32 $1, $0, 0f3F800000; rcp.approx.ftz.f32 $1, $1;",
            "=&f,=&f,f", [-1.4426950408889634 * tl.abs(logit)],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1)
    else:
        small = tl.exp(-tl.abs(logit))
        large = 1.0 / (1.0 + small)
    small *= large
    return tl.where(logit >= 0, large, small), tl.where(logit >= 0, small, large)


@triton.jit
def _break_stick(
    value, vectors, constants, threshold, OFFSETS: tl.constexpr, HARDWARE: tl.constexpr
):
    """The sticks of some tokens, all (TOKENS,): s_g and 1−s_g; of all G groups, α_g before halting
    and whether they are merged; the weight that each of those gets, and 1/(how many they are).

    A group is merged if less than the threshold is left before it; group 0 never is.
    """
    groups: tl.constexpr = len(OFFSETS) + 1
    left = tl.full((value.shape[0],), 1.0, tl.float32)
    sticks, others, weights, lefts = (), (), (), ()
    for g in tl.static_range(groups - 1):
        logit = tl.sum(value * vectors[g][None, :], 1) + (constants[g] - OFFSETS[g])
        stick, other = _sigmoids(logit, HARDWARE)
        sticks, others = sticks + (stick,), others + (other,)
        weights, lefts = weights + (left * stick,), lefts + (left,)
        left *= other
    weights, lefts = weights + (left,), lefts + (left,)
    share, inverse = tl.zeros_like(left), tl.full((value.shape[0],), 1.0, tl.float32)
    merged = (left < 0.0,)
    for g in tl.static_range(1, groups):
        merged = merged + (lefts[g] < threshold,)
    for g in tl.static_range(groups - 1, 0, -1):  # the first that is merged comes last
        share = tl.where(merged[g], lefts[g] * (1.0 / (groups - g)), share)
        inverse = tl.where(merged[g], 1.0 / (groups - g), inverse)
    return sticks, others, weights, merged, share, inverse


@triton.jit
def _load_block(
    x, strides, chunk, block, b, n, L, mask, mask_strides, D: tl.constexpr, PADDED_D: tl.constexpr,
    MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):
    """A block of a chunk, zero where not present; and beyond the chunk, as blocks load the next."""
    at, _, present = _tokens(
        chunk * BLOCKS + block, b, n, L, mask, mask_strides, MASKED, TOKENS)
    return _load(x, strides, at, present & (block < BLOCKS), D, PADDED_D)
