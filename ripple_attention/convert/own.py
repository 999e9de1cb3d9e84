"""The softmax attention of this package, as in its DeiT."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ripple_attention.convert.adapter import Adapter, Heads, adapts
from ripple_attention.modules import SoftmaxAttention


@adapts(SoftmaxAttention)
class RippleSoftmaxAttention(Adapter, SoftmaxAttention):
    """Of `GridVisionTransformer`: on the grid, or in a row behind class and register tokens."""

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        dropout = attention.attn_drop
        prefix = (getattr(owner, "num_prefix_tokens", None) for owner in owners)
        return Heads(
            attention.head_dim,
            attention.num_heads,
            num_prefix_tokens=next((x for x in prefix if x is not None), 0),
            refuse=f"dropout of attention probabilities (attn_drop = {dropout})" if dropout else "",
        )

    def forward(
        self,
        x: Tensor,
        value: Tensor | None = None,
        *,
        grid_size: tuple[int, int] | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        if x.dim() == 4:
            grid_size = (x.shape[1], x.shape[2])
        q, k, v = (y.flatten(1, -3) for y in self._project(x, value))  # (B, L, N, D)
        out = self.ripple(
            q,
            k,
            v,
            grid_size=grid_size or self.grid_size,
            key_padding_mask=key_padding_mask,
        )
        return self.proj_drop(self.proj(out.flatten(2))).view(x.shape)
