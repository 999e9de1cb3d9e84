"""Converts a model, block by block, says what became of each, and takes it back."""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ripple_attention.checks import check_module, shorten
from ripple_attention.convert.adapter import (
    ADAPTERS,
    Adapter,
    Grid,
    Heads,
    adapter_of,
    full_name,
    known_attentions,
)
from ripple_attention.convert.report import Block, Report
from ripple_attention.feature_maps import Hedgehog
from ripple_attention.heads import RippleHeads
from ripple_attention.partition import Partition

Choice = Literal["global", "all"] | Sequence[int] | Callable[[str, nn.Module], bool]
# What a conversion reads from the attention itself, and none of its options.
READ = frozenset({"head_dim", "num_heads", "scale", "num_prefix_tokens", "device", "dtype"})


@dataclass(frozen=True)
class Found:
    """An attention that is known, and the modules it lies in, from the nearest to the model."""

    index: int
    name: str
    attention: nn.Module
    owners: tuple[nn.Module, ...]
    adapter: type[Adapter]
    heads: Heads


def convert(
    model: nn.Module,
    blocks: Choice = "global",
    *,
    near: Literal["features", "softmax"] = "softmax",
    max_distance: int = 4,
    partition: str | Partition | Sequence[int] = "chebyshev",
    patches: str | None = None,
    **options: Any,
) -> Report:
    """Puts ripples in the place of softmax, in a model of timm, transformers or torchvision.

    The model is changed in place. Its weights stay the same parameters under the same names; what
    is new has the name `….ripple.…`. Where one block cannot be converted, none is.

    Args:
        model: With pretrained weights, or without.
        blocks: "global" converts every block that attends over the whole image, "all" demands
            that each block does; else numbers of blocks, or a function of name and attention.
        near: What weighs tokens inside of the last ring, see `RippleHeads`. "softmax" keeps most
            of what a pretrained model knows.
        max_distance: How far rings reach, in tokens.
        partition: A name, a `Partition`, or its `bounds`: radii, where there are no coarse rings.
        patches: The name of the module whose output (B, C, H, W) tells the grid of an image; found
            by itself where one convolution makes the patches.
        options: Further arguments of `RippleHeads`: weights, near_distance, feature_map, ….

    Raises:
        ValueError: The model has no attention that is known, or a chosen block computes something
            that ripples cannot keep. The message names it.
    """
    known, unknown = find_attentions(model)
    for name, _ in converted(model):
        raise ValueError(
            f"convert takes a model with softmax; got one that holds ripples in {name}: "
            "revert(model) first"
        )
    check_options(options)
    chosen = choose(known, unknown, blocks)
    if not isinstance(partition, str | Partition):
        partition = Partition.from_bounds(partition)
    settings = {"near": near, "max_distance": max_distance, **options}
    config = {
        "blocks": [one.index for one in chosen],
        **settings,
        "partition": partition if isinstance(partition, str) else partition.bounds,
        **({"patches": patches} if patches else {}),
    }
    settings["partition"] = partition
    made = [(one, make_ripple(one, settings), grid_source(one, model, patches)) for one in chosen]
    grids: dict[nn.Module, Grid] = {}
    new: dict[str, tuple[str, ...]] = {}
    for one, ripple, source in made:
        new[one.name] = tuple(f"ripple.{name}" for name, _ in ripple.named_parameters())
        grid = Grid()
        if source is not None:
            grid = grids.setdefault(source, grid)
        one.adapter.attach(one.attention, ripple, grid)
    for source, grid in grids.items():
        source.register_forward_hook(grid)
    saved: Any = getattr(model, "config", None)
    if hasattr(saved, "save_pretrained"):
        saved.ripples = config
    blocks_now = [describe(one, new.get(one.name)) for one in known]
    blocks_now += [
        Block(None, name, False, why=f"{type(module).__name__} is not known")
        for name, module in unknown.items()
    ]
    return Report(tuple(blocks_now), config)


def revert(model: nn.Module) -> tuple[str, ...]:
    """Gives a model its softmax back, with the weights it has now; returns names of blocks."""
    names = []
    for name, attention in list(converted(model)):
        kind = type(attention)
        adapter = kind if issubclass(kind, Adapter) else ADAPTERS[full_name(kind)]
        adapter.detach(attention)
        names.append(name)
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if isinstance(hook, Grid):
                del module._forward_hooks[key]
    saved: Any = getattr(model, "config", None)
    if hasattr(saved, "ripples"):
        del saved.ripples
    return tuple(names)


def converted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attentions of a model that hold ripples, by name."""
    check_module("model", model)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "ripple", None), RippleHeads):
            yield name, module


def find_attentions(model: nn.Module) -> tuple[list[Found], dict[str, nn.Module]]:
    """The attentions of a model that are known, and by name others that are called so."""
    check_module("model", model)
    known_attentions()
    modules = dict(model.named_modules())
    known: list[Found] = []
    unknown: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in modules.items():
        adapter = adapter_of(module)
        if not name or name.startswith(inside) or not (adapter or looks_like_attention(module)):
            continue
        inside += (f"{name}.",)
        if adapter is None:
            unknown[name] = module
            continue
        parts = name.split(".")
        owners = tuple(modules[".".join(parts[:end])] for end in reversed(range(len(parts))))
        heads = adapter.heads(module, owners)
        known.append(Found(len(known), name, module, owners, adapter, heads))
    return known, unknown


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module of an unknown class projects by itself, and is called an attention or has
    heads and no attention within, as a block that fuses both of its halves.
    """
    if not any(isinstance(child, nn.Linear) for child in module.children()):
        return False
    if called_attention(module):
        return True
    heads = any(hasattr(module, name) for name in ("num_heads", "num_attention_heads"))
    return heads and not any(adapter_of(x) or called_attention(x) for x in module.modules())


def called_attention(module: nn.Module) -> bool:
    names = [kind.__name__.lower() for kind in type(module).__mro__]
    return any("attention" in name or "attn" in name for name in names)


def choose(known: list[Found], unknown: dict[str, nn.Module], blocks: Choice) -> list[Found]:
    """The attentions that were asked for; refuses those that ripples cannot keep."""
    others = ", ".join(sorted({full_name(type(module)) for module in unknown.values()}))
    if not known:
        raise ValueError(
            f"convert takes a model whose attentions have an Adapter; got {others or 'none'}. "
            f"Those that have one are {', '.join(known_attentions())}. For others, write one: see "
            "ripple_attention.convert.adapts"
        )
    if callable(blocks):
        chosen = [one for one in known if blocks(one.name, one.attention)]
    elif blocks == "global":
        chosen = [one for one in known if not one.heads.leave]
    elif blocks == "all":
        chosen = known
    else:
        listed = isinstance(blocks, Collection) and not isinstance(blocks, str | Mapping)
        if not listed or not all(type(x) is int and 0 <= x < len(known) for x in blocks):
            raise ValueError(
                'blocks is "global", "all", numbers of blocks or a function of name and module; '
                f"got {shorten(blocks)} for a model of {len(known)} blocks, numbered from 0"
            )
        chosen = [one for one in known if one.index in [*blocks]]
    if not chosen:
        reasons = dict.fromkeys(one.heads.leave for one in known if one.heads.leave)
        left = f", which {', '.join(reasons)}" if reasons else ""
        more = f", and of others that need an Adapter: {others}" if others else ""
        raise ValueError(
            f"at least one block is converted; got none by blocks={shorten(blocks)} of "
            f'{len(known)}{left}{more}. blocks="all" takes every one'
        )
    for one in chosen:
        reason = one.heads.refuse or one.heads.leave or lost(one)
        if reason:
            raise ValueError(
                f"ripples cannot stand for block {one.index} ({one.name}): {reason}. Leave it out: "
                "blocks=[…] takes the numbers of the others"
            )
    return chosen


def lost(one: Found) -> str:
    """What somebody has added to an attention and its adapter knows nothing of."""
    if one.adapter.uses is None:
        return ""
    if "forward" in vars(one.attention):
        return "its forward has been replaced on the module itself, and would run instead"
    names = {name.split(".")[0] for name, _ in one.attention.named_parameters()}
    extra = sorted(names - one.adapter.uses)
    return f"its weights {', '.join(extra)} would go unused" if extra else ""


def check_options(options: dict[str, Any]) -> None:
    """Refuses what `RippleHeads` does not take, or gets from the attention."""
    known = inspect.signature(RippleHeads).parameters.keys() - READ
    for name in options.keys() - known:
        raise ValueError(
            f"options are further arguments of RippleHeads, one of {', '.join(sorted(known))}; "
            f"got {name}"
        )


def make_ripple(one: Found, settings: dict[str, Any]) -> RippleHeads:
    """New ripples for an attention, where its weights are."""
    weight = next((p for p in one.attention.parameters() if p.is_floating_point()), None)
    if weight is None:
        raise ValueError(
            f"an attention must have weights of floating-point numbers; got {one.name} without "
            "any: convert the model before it is quantised"
        )
    heads = one.heads
    ripple = RippleHeads(
        heads.head_dim,
        heads.num_heads,
        scale=heads.scale,
        num_prefix_tokens=heads.num_prefix_tokens,
        device=weight.device,
        dtype=weight.dtype,
        **settings,
    )
    embedding = getattr(ripple.spatial_weights, "embedding", None)
    if embedding is not None:  # uniform at the start: distance counted nothing to softmax
        nn.init.zeros_(embedding)
    if isinstance(ripple.feature_map, Hedgehog) and hasattr(ripple, "far_scale"):
        # Its features are probabilities: their products are 1/M where exp(q·k) is 1.
        nn.init.constant_(ripple.far_scale.bias, math.log(ripple.feature_map.num_features))
    return ripple.train(one.attention.training)


def grid_source(one: Found, model: nn.Module, patches: str | None) -> nn.Module | None:
    """The module whose output has the grid of an image; None where the attention's input has it.

    Unless named, it is the one convolution nearest above that steps as far as it sees.
    """
    if not one.adapter.needs_grid:
        return None
    if patches is not None:
        modules = dict(model.named_modules())
        if not isinstance(patches, str) or patches not in modules:
            raise ValueError(
                "patches names a module of the model whose output is (B, C, H, W), as "
                f"'patch_embed.proj'; got {patches=!r:.80}: dict(model.named_modules()) has them"
            )
        return modules[patches]
    found: list[nn.Module] = []
    for owner in one.owners:
        for module in owner.modules():
            if isinstance(module, nn.Conv2d) and module.stride != (1, 1):
                found += [module] if module.kernel_size == module.stride else []
        if found:
            break
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"the grid of {one.name} is read from the one convolution that makes patches; got "
        f"{len(found) or 'none'}: name the module whose output is (B, C, H, W), "
        "convert(…, patches='patch_embed.proj')"
    )


def describe(one: Found, new: tuple[str, ...] | None) -> Block:
    if new is None:
        why = one.heads.leave or one.heads.refuse or "not chosen"
        return Block(one.index, one.name, False, why=why)
    kept = (name for name, _ in one.attention.named_parameters() if name not in new)
    return Block(one.index, one.name, True, tuple(kept), new)
