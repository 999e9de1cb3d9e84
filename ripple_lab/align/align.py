"""Blocks learn what their teacher's put out, several at once; then features, end to end."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ripple_attention.convert import converted
from ripple_lab.align.lessons import (
    Batch,
    lesson_error,
    listening,
    relative_error,
    run,
    to_device,
)
from ripple_lab.align.progress import AlignProgress
from ripple_lab.files import replacing

Features = Callable[[nn.Module, Batch], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A part of an alignment.

    Attributes:
        name: "ripples" (new parameters alone), "blocks" (their projections too) or "features" (the
            same, towards the teacher's features).
        steps: How many batches.
        learning_rate: At its start; it falls to 0 as a cosine.
    """

    name: str
    steps: int
    learning_rate: float


def align(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int = 150,
    block_steps: int = 0,
    feature_steps: int = 0,
    learning_rate: float = 1e-2,
    tuning_rate: float = 1e-4,
    features: Features | None = None,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    console: Console | None = None,
) -> list[Row]:
    """Teaches the ripples of a converted model to do what softmax did, without labels.

    First each converted block learns its teacher's output from the teacher's input, all blocks of
    a batch in one pass of the teacher; new parameters alone, then, for `block_steps`, their
    projections too. For `feature_steps`, all of them learn the teacher's features at the end.

    On GPUs the blocks run under bfloat16 autocast. In a process group, each process takes its own
    batches and all keep the same parameters.

    Args:
        model: Converted; changed in place.
        teacher: The same model with softmax: a copy from before the conversion.
        batches: Normalised images (B, 3, H, W), or dictionaries for models that take names. Gone
            through again as often as the steps need; not an iterator.
        steps, block_steps, feature_steps: Batches of each part.
        learning_rate: Of the first part.
        tuning_rate: Of the others.
        features: What of (model, batch) is to agree at the end: tensors, in lists or dictionaries;
            `features_of` unless given.
        checkpoint: A file from which a stopped alignment goes on; written whole or not at all.
        checkpoint_seconds: How often.
        console: Where progress shows; nowhere unless given.

    Returns:
        A row for each step: stage, step, and the relative squared error of each block by its name,
        or of the "features".
    """
    stages = (
        Stage("ripples", steps, learning_rate),
        Stage("blocks", block_steps, tuning_rate),
        Stage("features", feature_steps, tuning_rate),
    )
    blocks = dict(converted(model))
    if not blocks:
        raise ValueError("align takes a model that holds ripples: convert(model) first")
    if any(converted(teacher)):
        raise ValueError("the teacher attends by softmax: take a copy from before the conversion")
    if iter(batches) is batches:
        raise ValueError("batches are gone through several times: give a list or a DataLoader")
    state = load(checkpoint)
    if state:
        model.load_state_dict(state["model"], strict=False)
    share_parameters(blocks)
    rows: list[Row] = state.get("rows", [])
    modes = {module: module.training for root in (model, teacher) for module in root.modules()}
    frozen = {p: p.requires_grad for root in (model, teacher) for p in root.parameters()}
    model.eval()
    teacher.eval().requires_grad_(False)
    try:
        with AlignProgress(console if is_main() else None) as progress:
            for stage in stages:
                done = sum(row["stage"] == stage.name for row in rows)
                if stage.steps > done:
                    trained = trainable(model, blocks, stage)
                    optimizer = torch.optim.AdamW(trained, stage.learning_rate, weight_decay=0.0)
                    if done:
                        optimizer.load_state_dict(state["optimizer"])
                    learn = Learning(model, teacher, blocks, features or features_of)
                    saved = time.monotonic()
                    progress.begin(stage.name, stage.steps, done)
                    try:
                        for batch in itertools.islice(forever(batches), done, stage.steps):
                            optimizer.param_groups[0]["lr"] = rate(stage, done)
                            row = learn(batch, stage, optimizer, trained)
                            rows.append({"stage": stage.name, "step": (done := done + 1), **row})
                            progress.show(rows[-1])
                            if time.monotonic() - saved > checkpoint_seconds:
                                save(checkpoint, model, blocks, optimizer, rows)
                                saved = time.monotonic()
                    finally:
                        save(checkpoint, model, blocks, optimizer, rows)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learns in frozen.items():
            parameter.requires_grad_(learns)
    return rows


class Learning:
    """One step: the errors of a batch, their gradients, and the optimizer's step."""

    def __init__(
        self, model: nn.Module, teacher: nn.Module, blocks: dict[str, Any], features: Features
    ):
        self.model, self.teacher, self.blocks = model, teacher, blocks
        self.features = features
        self.device = next(model.parameters()).device

    def __call__(
        self, batch: Batch, stage: Stage, optimizer: torch.optim.Optimizer, trained: list[Tensor]
    ) -> Row:
        batch = to_device(batch, self.device)
        optimizer.zero_grad()
        row = self.end_to_end(batch) if stage.name == "features" else self.by_block(batch)
        average_gradients(trained)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return row

    def by_block(self, batch: Batch) -> Row:
        row = {}
        with listening(self.model, self.teacher) as lessons:
            with torch.no_grad(), self.precision():
                run(self.teacher, batch)
            for name, attention in self.blocks.items():
                row[name] = self.backward(partial(lesson_error, attention, lessons.pop(name)))
        return row

    def end_to_end(self, batch: Batch) -> Row:
        with torch.no_grad(), self.precision():
            wanted = list(tensors_of(self.features(self.teacher, batch)))
        if not wanted:
            raise ValueError("features must have a tensor of floating-point numbers; got none")

        def error() -> Tensor:
            found = tensors_of(self.features(self.model, batch))
            pairs = zip(found, wanted, strict=True)
            return torch.stack([relative_error(*pair) for pair in pairs]).mean()

        return {"features": self.backward(error)}

    def backward(self, error: Callable[[], Tensor]) -> float:
        with self.precision():
            loss = error()
        loss.backward()
        return float(loss.detach())

    def precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


def features_of(model: nn.Module, batch: Batch) -> Any:
    """What a model makes of images before it classifies them.

    The maps of all blocks or stages where timm gives them; the last hidden state of transformers;
    else what the model returns.
    """
    intermediates: Any = getattr(model, "forward_intermediates", None)
    if intermediates is not None and isinstance(batch, Tensor):
        return intermediates(batch, intermediates_only=True)
    output = run(model, batch)
    return getattr(output, "last_hidden_state", output)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The floating-point tensors of nested lists and dictionaries."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
        return
    children = tree.values() if isinstance(tree, dict) else tree
    for child in children if isinstance(tree, dict | list | tuple) else ():
        yield from tensors_of(child)


def trainable(model: nn.Module, blocks: dict[str, Any], stage: Stage) -> list[Tensor]:
    """Marks and returns the parameters of a stage."""
    model.requires_grad_(False)
    parts = [block.ripple if stage.name == "ripples" else block for block in blocks.values()]
    trained = [p for part in parts for p in part.requires_grad_(True).parameters()]
    for block in blocks.values():
        block.ripple.train()
    return trained


def rate(stage: Stage, step: int) -> float:
    """The learning rate: a cosine from the stage's own to 0."""
    return float(
        stage.learning_rate * (1 + torch.cos(torch.tensor(torch.pi * step / stage.steps))) / 2
    )


def forever(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("there are no batches to align on")


def grouped() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_main() -> bool:
    return not grouped() or torch.distributed.get_rank() == 0


def share_parameters(blocks: dict[str, Any]) -> None:
    """All processes begin with the first one's."""
    if grouped():
        for block in blocks.values():
            for x in (*block.parameters(), *block.buffers()):
                torch.distributed.broadcast(x.data, 0)


def average_gradients(trained: list[Tensor]) -> None:
    if grouped():
        for p in trained:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            torch.distributed.all_reduce(gradient)
            p.grad = gradient / torch.distributed.get_world_size()


def save(
    path: Path | None,
    model: nn.Module,
    blocks: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    rows: list[Row],
) -> None:
    """Writes what an alignment has changed, whole or not at all."""
    if path is None or not is_main():
        return
    own = tuple(f"{name}." for name in blocks)
    weights = {name: x for name, x in model.state_dict().items() if name.startswith(own)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "rows": rows}, part)


def load(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return torch.load(path, map_location="cpu", weights_only=True)
