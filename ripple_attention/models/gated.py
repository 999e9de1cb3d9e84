"""Gated positional self-attention, ConViT's soft convolution."""

import math

import torch
from torch import Tensor, nn

from ripple_attention.modules import SoftmaxAttention
from ripple_attention.ops.common import accumulation_dtype, without_autocast


class GatedPositionalAttention(SoftmaxAttention):
    """Attention by content and by position, mixed by a gate (GPSA; d'Ascoli et al., 2021).

        A = (1 − σ(g)) softmax_j(q_i·k_j D^(−1/2)) + σ(g) softmax_j(w·[Δx, Δy, Δx² + Δy²])

    with Δ = j − i in columns and rows, and a gate g and a vector w for each head. Both parts add up
    to 1 over the visible keys, so A needs no further normalisation. Parameters are named as
    in timm's `GPSA`: `qk`, `v`, `proj`, `pos_proj` and `gating_param`.

    Args:
        dim: C, channels in and out.
        num_heads: N; divides `dim`.
        qkv_bias: Whether `qk` and `v` have a bias.
        proj_drop: Dropout after `proj`.

    >>> layer = GatedPositionalAttention(48, num_heads=4)
    >>> layer(torch.randn(2, 5, 7, 48)).shape
    torch.Size([2, 5, 7, 48])
    """

    needs_grid = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 6,
        *,
        qkv_bias: bool = False,
        proj_drop: float = 0.0,
    ):
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, proj_drop=proj_drop)
        del self.qkv  # values have a matrix of their own, which starts as the identity
        self.qk = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.pos_proj = nn.Linear(3, num_heads)
        self.gating_param = nn.Parameter(torch.ones(num_heads))
        self.local_init()

    @torch.no_grad()
    def local_init(self) -> None:
        """Makes the layer a convolution: head n looks at its own offset, and values pass as is.

        The first ⌊√N⌋² heads are the taps of a square kernel, column by column, with

            w·[Δx, Δy, Δ²] = −‖Δ − offset‖² + constant,

        and the other heads start near uniform. Call it again after an initialisation that sets
        all linear layers (timm's vision transformers do so, by the name `init_weights`).
        """
        nn.init.eye_(self.v.weight)
        nn.init.trunc_normal_(self.pos_proj.weight, std=0.02)
        for bias in (self.v.bias, self.pos_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        width = math.isqrt(self.num_heads)
        centre = (width - 1) / 2
        for head in range(width**2):
            x, y = head // width - centre, head % width - centre
            self.pos_proj.weight[head] = torch.tensor([2 * x, 2 * y, -1.0])

    init_weights = local_init

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        by_content = super().attend(q, k, v, key_padding_mask)
        values = v.flatten(1, 2)  # (B, L, N, E)
        with without_autocast(v):
            _, H, W, _, _ = v.shape
            scores = self.position_scores(H, W, accumulation_dtype(v))
            if key_padding_mask is not None:
                padded = key_padding_mask.flatten(1)
                values = values.masked_fill(padded[..., None, None], 0)
                # Not −∞, so that an image of padding alone gives zeros instead of NaN.
                lowest = torch.finfo(scores.dtype).min
                scores = scores.masked_fill(padded[:, None, None], lowest)
            attention = scores.softmax(-1).to(v.dtype)  # (B or 1, N, L, L)
            if key_padding_mask is None:  # one for all images: nothing of B×N×L×L is formed
                by_position = torch.einsum("nij,bjne->bine", attention[0], values)
            else:
                by_position = torch.einsum("bnij,bjne->bine", attention, values)
            gate = self.gating_param.to(accumulation_dtype(v)).sigmoid().unsqueeze(-1)
            out = (1 - gate) * by_content + gate * by_position.reshape(v.shape)
        return out.to(v.dtype)

    def position_scores(self, H: int, W: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """w·[Δx, Δy, Δx² + Δy²] of all queries and keys in raster order: (1, N, L, L)."""
        weight = self.pos_proj.weight.to(dtype)
        token = torch.arange(H * W, device=weight.device)
        # In `dtype` from here on: squared distances overflow half precision.
        dx, dy = ((p - p[:, None]).to(dtype) for p in (token % W, token // W))
        offsets = torch.stack([dx, dy, dx.square() + dy.square()])
        bias = self.pos_proj.bias.to(dtype)[:, None, None]
        return (torch.einsum("nc,cij->nij", weight, offsets) + bias).unsqueeze(0)

    def _project(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        heads = (self.num_heads, self.head_dim)
        q, k = self.qk(x).unflatten(-1, (2, *heads)).unbind(3)
        return q, k, self.v(x if value is None else value).unflatten(-1, heads)
