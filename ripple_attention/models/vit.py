"""Vision transformers on a grid of tokens: DeiT with any of the paper's attentions."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath, PatchEmbed, resample_abs_pos_embed
from timm.models.vision_transformer import Block, LayerScale, VisionTransformer
from torch import Tensor, nn

from ripple_attention.models.encodings import (
    ConvSPELinearAttention,
    PermutedLinearAttention,
    RotaryLinearAttention,
    RotaryRippleAttention,
    SineSPELinearAttention,
)
from ripple_attention.models.gated import GatedPositionalAttention
from ripple_attention.modules import (
    GridAttention,
    LinearAttention,
    RippleAttention,
    SoftmaxAttention,
)
from ripple_attention.operands import is_exporting
from ripple_attention.ops.common import accumulation_dtype, autocast_dtype
from ripple_attention.partition import dense

RIPPLE_OPTIONS = (
    "max_distance",
    "partition",
    "tile",
    "weights",
    "balanced",
    "halt_threshold",
    "tail",
    "near",
    "near_distance",
    "num_prefix_tokens",
    "implementation",
)
FEATURE_OPTIONS = ("feature_map", "num_features", "feature_map_options", "eps")
OF_THE_MODEL = ("qkv_bias", "depth")  # given to blocks, but the model makes the attentions
REMEDIES = {"attn_layer": "choose one by attention="}  # for others: leave the option out

MakeLayer = Callable[[int, dict[str, Any]], GridAttention]


class GridBlock(nn.Module):
    """A pre-norm transformer block on a grid (B, H, W, C), with timm's parameter names.

    The model sets the attention, because it knows how deep the block is, and `grid_size` for each
    image where tokens without a place come before those of the grid, in a row.

    Args:
        init_values: What LayerScale starts with; None for none.
        scale_mlp_norm: Whether the MLP has a norm between its layers.
        others: Other arguments of timm's blocks; refused unless they have the default value.
    """

    attn: nn.Module
    grid_size: tuple[int, int] | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        mlp_layer: type[nn.Module],
        act_layer: type[nn.Module],
        norm_layer: type[nn.Module],
        drop_path: float = 0.0,
        proj_drop: float = 0.0,
        init_values: float | None = None,
        scale_mlp_norm: bool = False,
        device: Any = None,
        dtype: Any = None,
        **others: Any,
    ):
        super().__init__()
        _refuse_what_is_set(others)
        self.norm1 = norm_layer(dim)
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = mlp_layer(
            in_features=dim,
            hidden_features=int(dim * mlp_ratio),
            act_layer=act_layer,
            norm_layer=norm_layer if scale_mlp_norm else None,
            drop=proj_drop,
        )
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()
        self.to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        where = {} if self.grid_size is None else {"grid_size": self.grid_size}
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), **where)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class PatchProjection(nn.Conv2d):
    """A convolution without overlapping windows, computed as a matrix product.

    GPU libraries are slow at such a convolution of few channels.

    Args:
        in_channels, out_channels, bias, device, dtype: As in `nn.Conv2d`.
        patch_size: Height and width of a window, or one number for both.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        patch_size: int | tuple[int, int],
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__(
            in_channels,
            out_channels,
            kernel_size=patch_size,
            stride=patch_size,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        if is_exporting():  # H and W are only symbols
            return super().forward(x)
        (rows, columns), (_, _, H, W) = self.kernel_size, x.shape
        if x.dtype != torch.float64:  # autocast leaves float64 alone
            x = x.to(autocast_dtype(x) or x.dtype)  # first: fewer bytes to move
        x = x[..., : H - H % rows, : W - W % columns]
        patches = x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (B, H/p, W/p, channels·p·p)
        return F.linear(patches, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class GridPatchEmbed(PatchEmbed):
    """timm's `PatchEmbed` with `PatchProjection`: parameters keep names, shapes and start."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        plain = self.proj
        sizes = plain.in_channels, plain.out_channels, plain.kernel_size, plain.bias is not None
        self.proj = nn.utils.skip_init(PatchProjection, *sizes)  # draws no numbers
        self.proj.weight, self.proj.bias = plain.weight, plain.bias


class GridVisionTransformer(VisionTransformer):
    """A vision transformer that keeps its tokens on their grid, and averages them at the end.

    It takes images of any size that the patches divide; position embeddings are resized.

    Args:
        attention: "ripple", "linear", "softmax", or another of `ATTENTIONS`.
        ripple_layers: How many of the first layers are ripple attention; the others are linear
            attention. 9 by default, or all if there are fewer.
        pos_embed: "learn" for absolute position embeddings, "none" for none.
        class_token: Whether to classify by a class token instead of the mean, as in DeiT. It has no
            place on a grid, so tokens come in a row. Of the layers that need a grid, only ripple
            attention takes it.
        reg_tokens: How many register tokens there are. They have no place on a grid either.
        rotary: Whether ripple attention turns queries and keys by their positions.
        partition: As in `RippleAttention`, or "dense": a ring for every distance of `img_size`.
        max_distance, tile, weights, balanced, halt_threshold, tail: As in `RippleAttention`.
        near, near_distance, implementation: As in `RippleAttention`.
        feature_map, num_features, feature_map_options, eps: As in `LinearAttention`.
        kwargs: As in timm's `VisionTransformer`; options that these models lack are refused.
    """

    def __init__(
        self,
        *,
        attention: str = "ripple",
        ripple_layers: int | None = None,
        rotary: bool = False,
        num_heads: int = 6,
        class_token: bool = False,
        reg_tokens: int = 0,
        **kwargs: Any,
    ):
        if attention not in ATTENTIONS:
            known = ", ".join(ATTENTIONS)
            raise ValueError(f"attention must be one of {known}; got {attention!r}")
        if rotary and attention != "ripple":
            raise ValueError(
                f"rotary is for ripple attention; got {attention=}. For linear attention take "
                'attention="rope".'
            )
        if "num_prefix_tokens" in kwargs:
            raise ValueError("prefix tokens of a model are class_token=True and reg_tokens=")
        taken = {n: kwargs.pop(n) for n in (*RIPPLE_OPTIONS, *FEATURE_OPTIONS) if n in kwargs}
        kwargs.pop("dynamic_img_size", None)  # always on: tokens stay on their grid
        in_a_row = class_token or reg_tokens
        for name in ("fix_init", *(() if in_a_row else ("patch_drop_rate", "no_embed_class"))):
            if kwargs.get(name):
                raise ValueError(f"{name} is not for models on a grid: leave it out")
        super().__init__(
            num_heads=num_heads,
            class_token=class_token,
            reg_tokens=reg_tokens,
            global_pool=kwargs.pop("global_pool", "token" if class_token else "avg"),
            fc_norm=kwargs.pop("fc_norm", False),  # norm, then mean, as in DeiT
            dynamic_img_size=True,
            block_fn=GridBlock,
            embed_layer=kwargs.pop("embed_layer", GridPatchEmbed),
            **kwargs,
        )
        if taken.get("partition") == "dense":
            taken["partition"] = dense(self.patch_embed.grid_size)
        taken["num_prefix_tokens"] = self.num_prefix_tokens
        taken |= {"qkv_bias": kwargs.get("qkv_bias", True), "num_heads": num_heads}
        depth = len(self.blocks)
        if ripple_layers is None:
            ripple_layers = min(9, depth)
        if not 0 <= ripple_layers <= depth:
            raise ValueError(
                f"ripple_layers counts layers, from the first: it is 0 to {depth} in a model of "
                f"depth {depth}; got {ripple_layers}"
            )
        taken |= {"proj_drop": kwargs.get("proj_drop_rate", 0.0), "ripple_layers": ripple_layers}
        taken["rotary"] = rotary
        for index, block in enumerate(self.blocks):
            layer = ATTENTIONS[attention](index, {"dim": self.embed_dim, **taken})
            block.attn = layer.to(device=kwargs.get("device"), dtype=kwargs.get("dtype"))
            _init_like_timm(block.attn)
            if not (in_a_row and block.attn.needs_grid):
                continue
            name = type(block.attn).__name__
            if not block.attn.num_prefix_tokens:
                raise ValueError(
                    f"{name} takes no class_token and no reg_tokens; got {class_token=}, "
                    f"{reg_tokens=}. They have no place on the grid: pool the tokens instead"
                )
            if kwargs.get("patch_drop_rate"):
                raise ValueError(
                    f"{name} needs the whole grid; got patch_drop_rate={kwargs['patch_drop_rate']}"
                    ": leave it out"
                )

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Adds the position embedding, resized to the grid of x (B, H, W, C).

        With class or register tokens, tokens come in a row, and these are the first.
        """
        B, H, W, _ = x.shape
        positions = None
        if self.pos_embed is not None:
            resample = _resample_for_export if is_exporting() else resample_abs_pos_embed
            positions = resample(
                self.pos_embed,
                new_size=[H, W],
                old_size=list(self.patch_embed.grid_size),
                num_prefix_tokens=0 if self.no_embed_class else self.num_prefix_tokens,
            )
        if not self.num_prefix_tokens:
            return self.pos_drop(x if positions is None else x + positions.unflatten(1, (H, W)))
        for block in self._blocks_with_a_row():
            block.grid_size = (H, W)
        x = x.flatten(1, 2)
        if positions is not None and self.no_embed_class:
            x = x + positions
        first = [t.expand(B, -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        x = torch.cat([*first, x], 1)
        if positions is not None and not self.no_embed_class:
            x = x + positions
        return self.pos_drop(x)

    def _blocks_with_a_row(self) -> list[Any]:
        """Blocks that need the grid and take tokens in a row, class and register tokens first."""
        return [block for block in self.blocks if getattr(block.attn, "num_prefix_tokens", 0)]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As timm's; refused where blocks are told the grid of an image, as they may forget it."""
        if enable and self._blocks_with_a_row():
            raise ValueError(
                "a model whose ripple layers take class or register tokens cannot be recomputed by "
                "checkpoints: a block knows the grid of the last image alone. Leave out "
                "class_token and reg_tokens, or checkpointing"
            )
        super().set_grad_checkpointing(enable)

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Images (B, channels, height, width) → normed tokens in a row (B, L, C)."""
        channels = getattr(self.patch_embed.proj, "in_channels", None)
        if x.dim() != 4 or channels not in (None, x.shape[1]):
            raise ValueError(
                f"images come as (B, {channels}, height, width); got {tuple(x.shape)}. For other "
                "channels make the model with in_chans="
            )
        tokens = super().forward_features(x, *args, **kwargs)
        if is_exporting():  # its sizes are symbols of the graph, which nobody else can read
            for block in self._blocks_with_a_row():
                block.grid_size = None
        return tokens if tokens.dim() == 3 else tokens.flatten(1, 2)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in timm; tokens come in a row if `output_fmt="NLC"`."""
        result = super().forward_intermediates(x, *args, **kwargs)
        if self.num_prefix_tokens:
            return result
        in_rows = kwargs.get("output_fmt") == "NLC"
        if isinstance(result, dict):
            intermediates, features = result["image_intermediates"], result.get("image_features")
        elif isinstance(result, tuple):
            features, intermediates = result
        else:
            features, intermediates = None, result
        if in_rows:
            intermediates = [y.flatten(1, 2) for y in intermediates]
        if features is not None:
            features = features.flatten(1, 2)
        if isinstance(result, dict):
            kept = {"image_intermediates": intermediates, "image_features": features}
            return {name: kept[name] for name in result}
        return intermediates if features is None else (features, intermediates)


def _resample_for_export(
    embedding: Tensor, new_size: list[int], old_size: list[int], num_prefix_tokens: int
) -> Tensor:
    """timm's `resample_abs_pos_embed` without its branch on the new size, which may be symbolic."""
    prefix, grid = embedding[:, :num_prefix_tokens], embedding[:, num_prefix_tokens:]
    grid = grid.to(accumulation_dtype(grid)).unflatten(1, old_size).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new_size, mode="bicubic", antialias=True)
    return torch.cat([prefix, grid.flatten(2).mT.to(embedding.dtype)], 1)


def _refuse_what_is_set(options: dict[str, Any]) -> None:
    """Refuses options of timm's blocks that do not have timm's default value."""
    defaults = {name: known.default for name, known in signature(Block).parameters.items()}
    for name, value in options.items():
        default = defaults.get(name)
        if name in OF_THE_MODEL or value == default or not (value or default):
            continue
        said = {"attn_drop": "attn_drop_rate"}.get(name, name)  # as the model calls it
        remedy = REMEDIES.get(name, "leave it out")
        raise ValueError(f"{said} is not for models on a grid; got {said}={value!r}: {remedy}")


def _init_like_timm(attention: nn.Module) -> None:
    """Truncated normal projections without bias, as elsewhere in timm's transformer.

    Feature maps and spatial weights keep their own start.
    """
    for name in ("qkv", "proj"):
        layer = getattr(attention, name, None)
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _options(options: dict[str, Any], *names: str) -> dict[str, Any]:
    shared = ("dim", "num_heads", "qkv_bias", "proj_drop")
    return {name: options[name] for name in (*shared, *names) if name in options}


def _ripple(index: int, options: dict[str, Any]) -> GridAttention:
    if index >= options["ripple_layers"]:
        return _linear(index, options)
    kind = RotaryRippleAttention if options["rotary"] else RippleAttention
    return kind(**_options(options, *RIPPLE_OPTIONS, *FEATURE_OPTIONS))


def _linear(
    index: int, options: dict[str, Any], kind: type[LinearAttention] = LinearAttention
) -> GridAttention:
    return kind(**_options(options, *FEATURE_OPTIONS))


def _softmax(index: int, options: dict[str, Any]) -> GridAttention:
    return SoftmaxAttention(**_options(options))


def _gated(index: int, options: dict[str, Any], gated_layers: int = 10) -> GridAttention:
    kind = SoftmaxAttention if index >= gated_layers else GatedPositionalAttention
    return kind(**_options(options) | {"qkv_bias": False})  # ConViT has no such bias anywhere


ATTENTIONS: dict[str, MakeLayer] = {
    "ripple": _ripple,
    "linear": _linear,
    "softmax": _softmax,
    "rope": partial(_linear, kind=RotaryLinearAttention),
    "permute": partial(_linear, kind=PermutedLinearAttention),
    "sinespe": partial(_linear, kind=SineSPELinearAttention),
    "convspe": partial(_linear, kind=ConvSPELinearAttention),
    "gated": _gated,
}
