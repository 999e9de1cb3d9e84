"""Attentions of transformers.

Most of its models ask a table for the function that mixes q, k and v, so one entry of that table
serves them all: projections, norms and rotations are the model's own code.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention
from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleAttention

from ripple_attention.checks import shorten
from ripple_attention.convert.adapter import (
    Adapter,
    Grid,
    Heads,
    MapAdapter,
    adapts,
    refuse_mask,
    windows,
)
from ripple_attention.convert.conversion import convert
from ripple_attention.heads import RippleHeads
from ripple_attention.operands import is_exporting

PREFIX = {
    "vit.modeling_vit.ViTAttention": lambda config: 1,
    "deit.modeling_deit.DeiTAttention": lambda config: 2,
    "ijepa.modeling_ijepa.IJepaAttention": lambda config: 0,
    "dinov2.modeling_dinov2.Dinov2Attention": lambda config: 1,
    "dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersAttention": (
        lambda config: 1 + config.num_register_tokens
    ),
    "dinov3_vit.modeling_dinov3_vit.DINOv3ViTAttention": (
        lambda config: 1 + config.num_register_tokens
    ),
    "siglip.modeling_siglip.SiglipAttention": lambda config: 0,
    "clip.modeling_clip.CLIPAttention": lambda config: 1,
    "owlvit.modeling_owlvit.OwlViTAttention": lambda config: 1,
    "aimv2.modeling_aimv2.Aimv2Attention": lambda config: 0,
    "dpt.modeling_dpt.DPTSelfAttention": lambda config: 1,
}
"""Attentions whose heads come from the table, and how many tokens stand in front of the grid's."""


def mix(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The entry of the table: q, k, v (B, N, L, D) → (B, L, N, D)."""
    hidden = None
    if attention_mask is not None and is_exporting():
        # Transformers makes one where it may not look whether any token is padded: equal rows.
        row = attention_mask[:, 0, 0].expand(len(v), -1)  # (B, L)
        hidden = ~row if row.dtype == torch.bool else row < 0
        attention_mask = None
    refuse_mask(attention_mask=attention_mask, is_causal=is_causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grid_size = attention.ripple_grid.current()
    return attention.ripple(q, k, v, grid_size=grid_size, key_padding_mask=hidden), None


AttentionInterface.register("ripple", mix)


@adapts(*(f"transformers.models.{name}" for name in PREFIX))
class FromTable(Adapter):
    """An attention that asks the table: it gets a configuration of its own that names `mix`."""

    uses = None  # all of them: the code that uses its weights is its own

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        config = attention.config
        heads = config.num_attention_heads
        scale = getattr(attention, "scaling", getattr(attention, "scale", None))
        names = ("attention_probs_dropout_prob", "attention_dropout")
        dropout = next((getattr(config, name, 0.0) for name in names if hasattr(config, name)), 0.0)
        text = any("Text" in type(owner).__name__ for owner in owners)
        kind = type(attention)
        return Heads(
            getattr(attention, "head_dim", config.hidden_size // heads),
            heads,
            scale,
            PREFIX[f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models.")](
                config
            ),
            leave="attends over text" if text else "",
            refuse=f"dropout of attention probabilities ({dropout})" if dropout else "",
        )

    @classmethod
    def attach(cls, attention: Any, ripple: RippleHeads, grid: Grid) -> None:
        attention.ripple, attention.ripple_grid = ripple, grid
        attention.config_before_ripples = attention.config
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "ripple"

    @classmethod
    def detach(cls, attention: Any) -> None:
        attention.config = attention.config_before_ripples
        del attention.ripple, attention.ripple_grid, attention.config_before_ripples


@adapts(Sam2MultiScaleAttention)
class RippleSam2Attention(MapAdapter, Sam2MultiScaleAttention):
    """Of SAM 2's image encoder."""

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        heads = attention.num_attention_heads
        return Heads(
            attention.dim_out // heads,
            heads,
            attention.scale,
            leave=windows(owners[0]),
            refuse="pooled queries (query_stride)" if attention.query_stride else "",
        )

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        return self.attend(hidden_states)


@adapts(SamVisionAttention, SamVisionSdpaAttention)
class RippleSamAttention(MapAdapter, SamVisionAttention):
    """Of SAM's image encoder, where it has no relative positions."""

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        heads = attention.num_attention_heads
        refuse = "relative positions (rel_pos_h, rel_pos_w)" if attention.use_rel_pos else ""
        if attention.dropout:
            refuse = f"dropout of attention probabilities ({attention.dropout})"
        width = attention.proj.in_features
        return Heads(
            width // heads, heads, attention.scale, leave=windows(owners[0]), refuse=refuse
        )

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None
    ) -> tuple[Tensor, Any]:
        return self.attend(hidden_states), None


def from_pretrained(kind: type[Any], path: Any, /, **options: Any) -> Any:
    """Loads a converted model that its `save_pretrained` wrote.

    Args:
        kind: The class of the model, as `Dinov2Model`.
        path: The folder.
        options: Of `kind.from_pretrained`.
    """

    if not (isinstance(kind, type) and hasattr(kind, "from_pretrained")):
        raise TypeError(
            "from_pretrained takes a class of a transformers model, as Dinov2Model; got "
            f"{shorten(kind)}. A model of timm keeps its weights by its state_dict alone."
        )

    def init(self: Any, config: Any, *args: Any, **rest: Any) -> None:
        kind.__init__(self, config, *args, **rest)
        if getattr(config, "ripples", None) is None:
            raise ValueError(
                f"the configuration in {path} has no `ripples`: it is that of a model that was "
                f"saved without them. Load it by {kind.__name__}.from_pretrained and convert it"
            )
        convert(self, **config.ripples)

    # The model must hold ripples before its weights come, so the class that loads them converts.
    loader: Any = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    model = loader.from_pretrained(path, **options)
    model.__class__ = kind
    return model
