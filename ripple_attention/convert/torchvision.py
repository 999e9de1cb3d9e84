"""The attention of torchvision's transformers, which is PyTorch's own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ripple_attention.convert.adapter import Adapter, Heads, adapts, refuse_mask


@adapts(nn.MultiheadAttention)
class RippleMultiheadAttention(Adapter, nn.MultiheadAttention):
    """Self-attention of torchvision's `VisionTransformer`: one class token, then the grid."""

    uses = frozenset({"in_proj_weight", "in_proj_bias", "out_proj"})

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        dropout = attention.dropout
        theirs = type(owners[0]).__module__ == "torchvision.models.vision_transformer"
        return Heads(
            attention.head_dim,
            attention.num_heads,
            num_prefix_tokens=1,
            leave="" if theirs else "may attend to other tokens than its own",
            refuse=f"dropout of attention probabilities ({dropout})" if dropout else "",
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        refuse_mask(attn_mask=attn_mask, is_causal=is_causal, key_padding_mask=key_padding_mask)
        if query is not key or key is not value:
            raise ValueError(
                "ripples are for self-attention, where query, key and value are one tensor: "
                "choose other blocks"
            )
        qkv = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # (B, L, N, D)
        out = self.ripple(q, k, v, grid_size=self.grid_size)
        return self.out_proj(out.flatten(2)), None
