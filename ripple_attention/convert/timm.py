"""Attentions of timm."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.layers.attention import Attention
from timm.models.eva import EvaAttention
from timm.models.hieradet_sam2 import MultiScaleAttention
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn
from torch.nn import functional as F

from ripple_attention.convert.adapter import (
    Adapter,
    Heads,
    MapAdapter,
    adapts,
    refuse_mask,
    windows,
)


def read(attention: Any, owners: Sequence[nn.Module], leave: str = "", refuse: str = "") -> Heads:
    """What all attentions of timm tell about themselves, and what none of their ripples keeps."""
    if dropout := getattr(getattr(attention, "attn_drop", None), "p", 0.0):
        refuse = f"dropout of attention probabilities (attn_drop.p = {dropout})"
    for owner in owners:
        if type(getattr(owner, "patch_drop", None)).__name__.startswith("PatchDropout"):
            refuse = "tokens that are dropped in training (patch_drop)"
    known = (getattr(x, "num_prefix_tokens", None) for x in (attention, *owners))
    prefix = next((x for x in known if x is not None), 0 if not owners else None)
    if prefix is None:
        refuse = "how many tokens stand in front of the grid's: set num_prefix_tokens of the model"
    width = attention.proj.in_features
    return Heads(
        width // attention.num_heads,
        attention.num_heads,
        attention.scale,
        prefix or 0,
        leave=leave,
        refuse=refuse,
    )


class Projections(Adapter):
    """What comes after the heads."""

    def finish(self: Any, x: Tensor, out: Tensor) -> Tensor:
        """Heads (B, L, N, D) → (B, L, C)."""
        out = getattr(self, "norm", nn.Identity())(out.flatten(2))
        if getattr(self, "gate", None) is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


@adapts(Attention)
class RippleAttention(Projections, Attention):
    """Of `VisionTransformer`: DeiT, DINOv2, SigLIP and most others."""

    uses = frozenset({"qkv", "q_norm", "k_norm", "norm", "gate", "proj"})

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        return read(attention, owners)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        refuse_mask(attn_mask=attn_mask, is_causal=is_causal)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # (B, L, N, D)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.finish(x, self.ripple(q, k, v, grid_size=self.grid_size))


class Rotated(Projections):
    """Queries and keys of the grid are rotated by their place, those of prefix tokens are not."""

    uses = RippleAttention.uses | {"q_proj", "k_proj", "v_proj", "q_bias", "k_bias", "v_bias"}

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        return read(attention, owners)

    def project(self: Any, x: Tensor) -> list[Tensor]:
        if self.qkv is None:
            return [projection(x) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        if getattr(self, "q_bias", None) is None:
            return list(self.qkv(x).chunk(3, -1))
        added = F.pad(self.q_bias, (0, 2 * len(self.q_bias)))  # keys have no bias
        added = added + F.pad(self.v_bias, (2 * len(self.v_bias), 0))
        return list((self.qkv(x) + added).chunk(3, -1))

    def forward(
        self: Any,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        refuse_mask(attn_mask=attn_mask, is_causal=is_causal)
        projected = self.project(x)
        q, k, v = (y.unflatten(-1, (-1, self.ripple.head_dim)) for y in projected)  # (B, L, ·, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotate(q, rope).type_as(v), self.rotate(k, rope).type_as(v)
        if (shared := getattr(self, "num_kv_groups", 1)) > 1:  # heads of queries that share a key
            k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
        return self.finish(x, self.ripple(q, k, v, grid_size=self.grid_size))

    def rotate(self: Any, x: Tensor, rope: Tensor) -> Tensor:
        prefix, grid = x.tensor_split([self.num_prefix_tokens], 1)
        half = getattr(self, "rotate_half", False)
        grid = apply_rot_embed_cat(grid.transpose(1, 2), rope, half=half).transpose(1, 2)
        return torch.cat([prefix, grid], 1)


@adapts(EvaAttention)
class RippleEvaAttention(Rotated, EvaAttention):
    """Of `Eva`: EVA-02, DINOv3, Perception Encoder."""


@adapts(AttentionRope)
class RippleAttentionRope(Rotated, AttentionRope):
    """Of `Eva` with attn_type="rope", and of timm's own ViTs with rotary positions."""


@adapts(MultiScaleAttention)
class RippleMultiScaleAttention(MapAdapter, MultiScaleAttention):
    """Of `HieraDet`, the image encoder of SAM 2."""

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        pools = "pooled queries (q_pool)" if attention.q_pool is not None else ""
        return read(attention, (), leave=windows(owners[0]), refuse=pools)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@adapts(SamAttention)
class RippleSamAttention(Adapter, SamAttention):
    """Of `VisionTransformerSAM`: ViTDet and SAM, where they have no relative positions."""

    uses = frozenset({"qkv", "q_norm", "k_norm", "proj", "rope"})
    needs_grid = False

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        relative = "relative positions (rel_pos_h, rel_pos_w)" if attention.use_rel_pos else ""
        return read(attention, (), leave=windows(owners[0]), refuse=relative)

    def forward(self: Any, x: Tensor) -> Tensor:
        grid = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (B, H, W, 3, N, D)
        q, k, v = grid.flatten(1, 2).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            rope = self.rope.get_embed()
            q, k = (apply_rot_embed_cat(y.transpose(1, 2), rope).transpose(1, 2) for y in (q, k))
        out = self.ripple(q.type_as(v), k.type_as(v), v, grid_size=x.shape[1:3])
        return self.proj_drop(self.proj(out.flatten(2).unflatten(1, x.shape[1:3])))
