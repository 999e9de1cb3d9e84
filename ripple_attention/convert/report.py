"""What became of a model's attentions."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Block:
    """What became of one attention.

    Attributes:
        index: Its number among the attentions of the model; None for one of an unknown class.
        name: Of the module.
        converted: Whether it holds ripples now.
        kept: The parameters that it kept.
        new: The parameters that ripples brought.
        why: Why it was left, if it was.
    """

    index: int | None
    name: str
    converted: bool
    kept: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        if not self.converted:
            return f"stays: {self.why}"
        kept = dict.fromkeys(name.split(".")[0] for name in self.kept)
        new = dict.fromkeys(name.split(".")[1] for name in self.new)
        return f"ripples: keeps {', '.join(kept)}; new are {', '.join(new)}"


@dataclass(frozen=True)
class Report:
    """What a conversion did; printed, it is a table.

    Attributes:
        blocks: Every attention of the model.
        config: Makes the same conversion again: `convert(fresh_model, **report.config)`. Plain
            numbers, texts and lists, as JSON has them.
    """

    blocks: tuple[Block, ...]
    config: dict[str, Any]

    def __str__(self) -> str:
        width = max(len(block.name) for block in self.blocks)
        return "\n".join(
            f"{'–' if block.index is None else block.index!s:>3}  {block.name:<{width}}  {block}"
            for block in self.blocks
        )
