"""What an attention of another library needs to hold ripples, and the table of those that can."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor, nn

from ripple_attention.checks import shorten
from ripple_attention.heads import RippleHeads

ADAPTERS: dict[str, type["Adapter"]] = {}
"""Full name of a class of attention → what holds ripples in its place."""


@dataclass(frozen=True)
class Heads:
    """What ripples must know of an attention.

    Attributes:
        head_dim: D, channels of a head.
        num_heads: N.
        scale: Of the scores; None for D^(−1/2).
        num_prefix_tokens: Class and register tokens in front of those of the grid.
        leave: Why `blocks="global"` passes it by, if it does: "attends within windows of 14×14".
        refuse: What it computes that ripples cannot keep: "relative positions (rel_pos_h)".
    """

    head_dim: int
    num_heads: int
    scale: float | None = None
    num_prefix_tokens: int = 0
    leave: str = ""
    refuse: str = ""


class Grid:
    """The grid of the image that passes: a forward hook of the module that makes patches."""

    size: tuple[int, int] | None = None

    def __call__(self, patches: nn.Module, args: Any, output: Tensor) -> None:
        if output.dim() != 4:
            raise ValueError(
                "the grid is read from the output (B, C, H, W) of the module that makes patches; "
                f"got {tuple(output.shape)} from {type(patches).__name__}: name another module, "
                "convert(…, patches='patch_embed.proj')"
            )
        self.size = (output.shape[-2], output.shape[-1])

    def current(self) -> tuple[int, int]:
        if self.size is None:
            raise ValueError(
                "the grid is known once an image has passed the model's patches; got none so far: "
                "call the model, or set ripple_grid.size = (H, W) to call its attention alone"
            )
        return self.size


class Adapter(nn.Module):
    """An attention of another library with ripples in place of its softmax.

    Derive from this and from the attention, and write `heads` and `forward`. Conversion changes the
    class of the module and nothing else: its parameters, their names and its hooks stay.

    Attributes:
        uses: The modules and parameters of the attention that `forward` uses. An attention with a
            weight beyond these is refused.
        ripple: Mixes q, k, v (B, P + H·W, N, D) → (B, P + H·W, N, D).
        grid_size: (H, W) of the image that passes, known from its patches.
    """

    uses: ClassVar[frozenset[str] | None] = frozenset({"qkv", "proj"})
    needs_grid: ClassVar[bool] = True  # False where the input itself is (B, H, W, C)

    ripple: RippleHeads
    ripple_grid: Grid

    @property
    def grid_size(self) -> tuple[int, int]:
        return self.ripple_grid.current()

    @classmethod
    def heads(cls, attention: Any, owners: Sequence[nn.Module]) -> Heads:
        """Reads an attention of the library.

        Args:
            attention: An instance of the class that this adapter is for.
            owners: The modules it lies in, from the nearest to the model.
        """
        raise NotImplementedError

    @classmethod
    def attach(cls, attention: Any, ripple: RippleHeads, grid: Grid) -> None:
        """Gives an attention its ripples."""
        attention.ripple, attention.ripple_grid = ripple, grid
        attention.class_before_ripples = type(attention)
        attention.__class__ = cls

    @classmethod
    def detach(cls, attention: Any) -> None:
        """Takes them away again."""
        attention.__class__ = attention.class_before_ripples
        del attention.ripple, attention.ripple_grid, attention.class_before_ripples


class MapAdapter(Adapter):
    """For attentions whose input is (B, H, W, C), and q, k and v are of one `qkv`."""

    needs_grid = False

    def attend(self: Any, x: Tensor) -> Tensor:
        """(B, H, W, C) → the same, all that such an attention does."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.ripple.num_heads, -1)).flatten(1, 2).unbind(2)
        out = self.ripple(q, k, v, grid_size=x.shape[1:3])  # (B, H·W, N, D)
        return self.proj(out.flatten(2).unflatten(1, x.shape[1:3]))


def windows(block: Any) -> str:
    """Whether a block of ViTDet's or Hiera's kind attends within windows, in words."""
    size = block.window_size if isinstance(block.window_size, tuple) else (block.window_size,) * 2
    return f"attends within windows of {size[0]}×{size[1]} tokens" if any(size) else ""


def adapts(*names: str | type[nn.Module]) -> Callable[[type[Adapter]], type[Adapter]]:
    """Registers an adapter for classes of attention, or for their full names.

    A name without a class behind it, as that of another version of the library, does no harm.
    """

    def register(adapter: type[Adapter]) -> type[Adapter]:
        for name in names:
            if not isinstance(name, str) and not (
                isinstance(name, type) and issubclass(name, nn.Module)
            ):
                raise TypeError(
                    "an Adapter is for classes of modules or their full names; got "
                    f"{shorten(name)}. A name is as 'timm.layers.attention.Attention'."
                )
            ADAPTERS[name if isinstance(name, str) else full_name(name)] = adapter
        return adapter

    return register


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def known_attentions() -> tuple[str, ...]:
    """The classes of attention that can hold ripples, of all libraries that are imported."""
    for ours in ("own", "torchvision"):  # they need torch alone
        import_module(f"ripple_attention.convert.{ours}")
    for library in ("timm", "transformers"):
        if sys.modules.get(library) is not None:  # else no model is of its classes
            with suppress(ImportError):  # of a version that has not all of them
                import_module(f"ripple_attention.convert.{library}")
    return tuple(ADAPTERS)


def adapter_of(attention: nn.Module) -> type[Adapter] | None:
    """The adapter for exactly this class: one that derives from it may compute something else."""
    return ADAPTERS.get(full_name(type(attention)))


def refuse_mask(**given: Any) -> None:
    """Refuses masks of a call, by name."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(
                f"ripples over a grid see all of the image; got {name}={type(value).__name__}: "
                "call the model without it, or revert(model)"
            )
