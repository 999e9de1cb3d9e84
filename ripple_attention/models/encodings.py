"""Linear attention with position encodings, rotary, permuted and stochastic; rotary ripples."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ripple_attention.feature_maps import create_feature_map
from ripple_attention.functional import check_eps, linear_attention
from ripple_attention.modules import GridAttention, LinearAttention, RippleAttention
from ripple_attention.operands import check_mask, in_autocast_type
from ripple_attention.ops.common import (
    accumulation_dtype,
    safe_divide,
    without_autocast,
    without_padding,
)


def rotate(x: Tensor, base: float = 100.0) -> Tensor:
    """Rotates the first half of the channels by a token's row, the second half by its column.

        (a, b) → (a cos pω_j − b sin pω_j, a sin pω_j + b cos pω_j),    ω_j = base^(−4j/M)

    for the j-th pair of neighbouring channels of either half, at p = row or p = column. So x·y
    depends on the distance between two tokens, not on where they are.

    Args:
        x: (B, H, W, N, M) with 4 dividing M.
        base: The slowest pair turns about `base` times slower than the fastest.

    Returns:
        (B, H, W, N, M), in the type of x; the angles are float32 or better.
    """
    _, H, W, _, M = x.shape
    with without_autocast(x):
        dtype = accumulation_dtype(x)
        pair = torch.arange(M // 4, device=x.device, dtype=dtype)
        rows, columns = (
            torch.arange(size, device=x.device, dtype=dtype)[:, None] * base ** (-4 * pair / M)
            for size in (H, W)
        )
        angles = torch.stack(
            [rows[:, None].expand(H, W, -1), columns[None].expand(H, W, -1)], 2
        ).unsqueeze(2)  # (H, W, 1, 2, M/4)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.to(dtype).unflatten(-1, (2, M // 4, 2)).unbind(-1)  # (B, H, W, N, 2, M/4) each
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-3).to(x.dtype)


def _check_base(base: float) -> float:
    if not base > 0:
        raise ValueError(f"base must be positive; got {base=}. Grids of tokens suit 100.")
    return base


class RotaryLinearAttention(LinearAttention):
    """Linear attention with axial rotary positions (Su et al., 2021) on the features.

        out_i = ρ(φq_i)ᵀ Σ_j ρ(φk_j) v_jᵀ  ÷  (φq_iᵀ Σ_j φk_j + eps)

    with ρ as in `rotate`. The denominator uses the features without rotation, because rotated
    ones may have products of either sign, and their sum may vanish.

    Args:
        base: As in `rotate`.
        dim, num_heads, options: As in `LinearAttention`; 4 must divide the number of features.
    """

    needs_grid = True

    def __init__(self, dim: int, num_heads: int = 6, *, base: float = 100.0, **options: Any):
        super().__init__(dim, num_heads, **options)
        if self.feature_map.num_features % 4:
            raise ValueError(
                "rotary positions turn pairs of channels in each of two halves: 4 must divide the "
                f"number of features; got {self.feature_map.num_features}. Set num_features."
            )
        self.base = _check_base(base)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        phi_q, phi_k, v = in_autocast_type(*self.feature_map(q, k), v)
        check_mask(key_padding_mask, v)
        if key_padding_mask is not None:
            phi_k, v = without_padding(phi_k, v, key_padding_mask)
        with without_autocast(v):
            queries, keys, values = (x.to(accumulation_dtype(v)) for x in (phi_q, phi_k, v))
            state = torch.einsum("bhwnm,bhwne->bnme", rotate(keys, self.base), values)
            numerator = torch.einsum("bhwnm,bnme->bhwne", rotate(queries, self.base), state)
            denominator = torch.einsum("bhwnm,bnm->bhwn", queries, keys.sum((1, 2)))
            return safe_divide(numerator, denominator.unsqueeze(-1) + self.eps).to(v.dtype)


class RotaryRippleAttention(RippleAttention):
    """Ripple attention whose queries and keys are rotated by their positions.

    With near="softmax" the score of two near tokens depends on their offset alone. Features are
    made of rotated queries and keys. Prefix tokens have no position and stay as they are.

    Args:
        base: As in `rotate`.
        dim, num_heads, options: As in `RippleAttention`; 4 must divide the width of a head.
    """

    def __init__(self, dim: int, num_heads: int = 6, *, base: float = 100.0, **options: Any):
        super().__init__(dim, num_heads, **options)
        if self.head_dim % 4:
            raise ValueError(
                "rotary positions turn pairs of channels in each of two halves: 4 must divide the "
                f"width of a head; got {self.head_dim}. Choose dim and num_heads so."
            )
        self.base = _check_base(base)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        q, k = (rotate(x, self.base) for x in (q, k))
        return super().attend(q, k, v, key_padding_mask)

    def attend_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        P = self.num_prefix_tokens
        if P:  # else `attend` is called
            turned = (rotate(x[:, P:].unflatten(1, grid_size), self.base) for x in (q, k))
            pairs = zip((q, k), turned, strict=True)
            q, k = (torch.cat([x[:, :P], y.flatten(1, 2)], 1) for x, y in pairs)
        return super().attend_tokens(q, k, v, grid_size, key_padding_mask)


class PermutedLinearAttention(LinearAttention):
    """Linear attention whose features are permuted by position (PermuteFormer; Chen, 2021), in 2-D.

        π(x)_c = x_{P^row(c)}  for the first half of the channels,  x_{P^column(c)}  for the second

    for φ(q) and φ(k) alike, with one random permutation P of M/2 channels for each head. Features
    stay non-negative if φ is, and π(φq_i)·π(φk_j) depends only on the offset between i and j.
    There are no parameters; a seed gives all layers the same permutations.

    Args:
        seed: The permutations are drawn from it.
        dim, num_heads, options: As in `LinearAttention`; the number of features must be even.
    """

    needs_grid = True
    channels: Tensor
    start: Tensor
    rank: Tensor
    length: Tensor

    def __init__(self, dim: int, num_heads: int = 6, *, seed: int = 0, **options: Any):
        super().__init__(dim, num_heads, **options)
        num_features = self.feature_map.num_features
        if num_features % 2:
            raise ValueError(
                "one half of the features is permuted by row, the other by column: their number "
                f"must be even; got {num_features}. Set num_features."
            )
        generator = torch.Generator().manual_seed(seed)
        tables = [
            _cycles(torch.randperm(num_features // 2, generator=generator, device="cpu").tolist())
            for _ in range(num_heads)
        ]
        # The permutations follow from the seed, so a state dict need not hold them.
        for i, name in enumerate(("channels", "start", "rank", "length")):
            values = torch.tensor([table[i] for table in tables])  # (N, M/2)
            self.register_buffer(name, values, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        phi_q, phi_k = (self.permute(x) for x in self.feature_map(q, k))
        return linear_attention(phi_q, phi_k, v, key_padding_mask=key_padding_mask, eps=self.eps)

    def permute(self, x: Tensor) -> Tensor:
        """π: features (B, H, W, N, M) → (B, H, W, N, M)."""
        _, H, W, _, _ = x.shape
        by_row, by_column = x.chunk(2, -1)
        rows, columns = self.powers(H)[:, None], self.powers(W)
        return torch.cat(
            [
                by_row.gather(-1, rows.expand(by_row.shape)),
                by_column.gather(-1, columns.expand(by_column.shape)),
            ],
            -1,
        )

    def powers(self, count: int) -> Tensor:
        """P^0, P^1, …, P^(count−1): int64 (count, N, M/2)."""
        exponent = torch.arange(count, device=self.channels.device)[:, None, None]
        place = self.start + (self.rank + exponent) % self.length
        return self.channels.expand(count, -1, -1).gather(-1, place)


def _cycles(permutation: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    """A permutation as cycles, whose powers are a step along the cycle instead of many gathers.

    Returns:
        The channels listed cycle by cycle; and for each channel, where its cycle starts in that
        list, its rank in the cycle, and the length of the cycle.
    """
    channels: list[int] = []
    start, rank, length = ([0] * len(permutation) for _ in range(3))
    for first in range(len(permutation)):
        if first in channels:
            continue
        cycle = [first]
        while (following := permutation[cycle[-1]]) != first:
            cycle.append(following)
        for i, channel in enumerate(cycle):
            start[channel], rank[channel], length[channel] = len(channels), i, len(cycle)
        channels += cycle
    return channels, start, rank, length


def seeded_normal(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Standard normal numbers that depend only on a seed: the same on every device.

    Each is the Box–Muller transform of two hashed counters. `torch.Generator` would differ between
    devices and cannot be made inside a compiled graph.

    Args:
        shape: Of the result.
        seed: At least 0.
        device: Where the result is made.

    Returns:
        float32, in the given shape.

    >>> seeded_normal((2, 2), 0, torch.device("cpu")).shape
    torch.Size([2, 2])
    """
    bits = torch.arange(2 * math.prod(shape), device=device)  # in place: faster on a CPU
    bits.add_(0x9E3779B1 * (seed + 1)).bitwise_and_(0xFFFFFFFF)
    for _ in range(2):  # products stay below 2^63, so nothing overflows
        bits.bitwise_xor_(bits >> 16).mul_(0x45D9F3B).bitwise_and_(0xFFFFFFFF)
    bits.bitwise_xor_(bits >> 16)
    # (0, 1], so that its logarithm is finite
    uniform = bits.bitwise_right_shift_(8).float().add_(0.5).mul_(2**-24).view(*shape, 2)
    return (-2 * uniform[..., 0].log()).sqrt() * (2 * math.pi * uniform[..., 1]).cos()


class StochasticLinearAttention(LinearAttention):
    """Linear attention with stochastic positional encoding (SPE; Liutkus et al., 2021), gated.

        q̂_{i,r} = Σ_d q_{i,d} q̄_{i,d,r},    k̂_{j,r} = Σ_d k_{j,d} k̄_{j,d,r},    r = 1 … R

    and φ is applied to q̂ and k̂, which are R wide. The codes q̄ and k̄ are noise that is correlated
    across positions, so that with P_d the kernel of the subclass and g = σ(gate)

        E[q̂_i·k̂_j] = √(R/D) Σ_d q_{i,d} k_{j,d} ((1 − g_d) P_d(i − j) + g_d).

    Positions i and j are raster indices: the encoding is one-dimensional. In training the noise
    is drawn at each call; in evaluation it follows from the seed and the number of tokens.

    Args:
        num_realizations: How many draws, R.
        seed: Of the noise in evaluation, at least 0.
        dim, num_heads, feature_map, num_features, feature_map_options, eps, qkv_bias, proj_drop: As
            in `LinearAttention`, the map being one of R channels.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
        *,
        num_realizations: int = 32,
        seed: int = 0,
        feature_map: str = "learned",
        num_features: int | None = None,
        feature_map_options: dict[str, Any] | None = None,
        eps: float = 1.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
    ):
        # Not LinearAttention's: it would make a map of head_dim channels.
        GridAttention.__init__(self, dim, num_heads, qkv_bias=qkv_bias, proj_drop=proj_drop)
        if num_realizations < 1 or seed < 0:
            raise ValueError(
                "num_realizations must be at least 1 and seed at least 0; "
                f"got {num_realizations=}, {seed=}"
            )
        self.num_realizations = num_realizations
        self.seed = seed
        self.feature_map = create_feature_map(
            feature_map,
            num_realizations,
            num_heads=num_heads,
            num_features=num_features,
            **(feature_map_options or {}),
        )
        self.eps = check_eps(eps)
        self.gate = nn.Parameter(torch.randn(num_heads, self.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        _, H, W, _, _ = q.shape
        with without_autocast(q):
            dtype = accumulation_dtype(q)
            encoded = (
                torch.einsum("blnd,lndr->blnr", x.flatten(1, 2).to(dtype), code)
                for x, code in zip((q, k), self.codes(H * W, dtype), strict=True)
            )
            q_hat, k_hat = (x.unflatten(1, (H, W)).to(v.dtype) for x in encoded)
        return super().attend(q_hat, k_hat, v, key_padding_mask)

    def codes(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """q̄ and k̄ of the first `count` positions, each (count, N, D, R)."""
        gate = self.gate.to(dtype).sigmoid().unsqueeze(-1)
        everywhere = self.draw((*self.gate.shape, self.num_realizations), 1, dtype)
        scale = (self.num_realizations * self.head_dim) ** -0.25
        # All positions share one noise, so where only this part counts, position does not matter.
        constant = gate.sqrt() * everywhere
        code_q, code_k = (
            scale * ((1 - gate).sqrt() * code + constant) for code in self.process(count, dtype)
        )
        return code_q, code_k

    def process(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two processes with E[q̄_{i,d} k̄_{j,d}] = P_d(i − j), each (count, N, D, R)."""
        raise NotImplementedError

    def draw(self, shape: tuple[int, ...], stream: int, dtype: torch.dtype) -> Tensor:
        """Standard normal noise: new in training, from the seed in evaluation."""
        if self.training:
            return torch.randn(shape, device=self.gate.device, dtype=dtype)
        return seeded_normal(shape, 2 * self.seed + stream, self.gate.device).to(dtype)

    def extra_repr(self) -> str:
        own = f"num_realizations={self.num_realizations}, seed={self.seed}"
        return f"{own}, {super().extra_repr()}"


class SineSPELinearAttention(StochasticLinearAttention):
    """Linear attention with SineSPE: positions are sums of K sines with random amplitudes.

        P(i − j) = 1/(2K) Σ_k γ_k² cos(2π f_k (i − j) + θ_k),   f = σ(freqs)/2, γ = softplus(gains)

    with frequencies, offsets θ and gains of their own for each head and channel. Frequencies start
    low, so that the encoding reaches far.

    Args:
        num_sines: How many sines, K.
        dim, num_heads, options: As in `StochasticLinearAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 6, *, num_sines: int = 10, **options: Any):
        super().__init__(dim, num_heads, **options)
        if num_sines < 1:
            raise ValueError(f"SineSPE needs at least one sine; got {num_sines=}")
        shape = (num_heads, self.head_dim, num_sines)
        gains = torch.randn(shape)
        self.freqs = nn.Parameter(torch.randn(shape) - 4)
        self.offsets = nn.Parameter(torch.randn(shape))
        self.gains = nn.Parameter(2 * gains / gains.norm(dim=-1, keepdim=True).sqrt())

    def process(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        N, D, K = self.freqs.shape
        position = torch.arange(count, device=self.freqs.device, dtype=dtype)[:, None]
        phase_k = math.pi * self.freqs.to(dtype).sigmoid().unsqueeze(2) * position  # (N, D, L, K)
        phase_q = phase_k + self.offsets.to(dtype).unsqueeze(2)
        gains = F.softplus(self.gains.to(dtype)).repeat(1, 1, 2).unsqueeze(-1) * (2 * K) ** -0.5
        amplitudes = gains * self.draw((N, D, 2 * K, self.num_realizations), 0, dtype)
        process_q, process_k = (
            (torch.cat([phase.cos(), phase.sin()], -1) @ amplitudes).permute(2, 0, 1, 3)
            for phase in (phase_q, phase_k)
        )
        return process_q, process_k


class ConvSPELinearAttention(StochasticLinearAttention):
    """Linear attention with ConvSPE: positions are noise, filtered by learned kernels.

        P(i − j) = Σ_t w^q_t w^k_{t+i−j},    which is 0 for tokens a kernel or more apart

    with kernels of their own for each head and channel, that start uniform in [0, (k/2)^(−1/2)).
    The noise is longer than the tokens by `kernel_size − 1`, so borders have no effect.

    Args:
        kernel_size: k, the length of the kernels along the raster.
        dim, num_heads, options: As in `StochasticLinearAttention`.
    """

    def __init__(self, dim: int, num_heads: int = 6, *, kernel_size: int = 200, **options: Any):
        super().__init__(dim, num_heads, **options)
        if kernel_size < 1:
            raise ValueError(f"ConvSPE needs a kernel of at least one tap; got {kernel_size=}")
        shape = (num_heads, self.head_dim, kernel_size)
        self.conv_q = nn.Parameter(torch.rand(shape) * (kernel_size / 2) ** -0.5)
        self.conv_k = nn.Parameter(torch.rand(shape) * (kernel_size / 2) ** -0.5)

    def process(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        N, D, taps = self.conv_q.shape
        noise = self.draw((self.num_realizations, N * D, count + taps - 1), 0, dtype)
        process_q, process_k = (
            F.conv1d(noise, weight.to(dtype).view(N * D, 1, taps), groups=N * D)
            .unflatten(1, (N, D))
            .permute(3, 1, 2, 0)
            for weight in (self.conv_q, self.conv_k)
        )
        return process_q, process_k
