"""Blocks learn what their teacher's put out, several at once; then features, end to end."""

import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ripple_attention.checks import check_count, check_number, shorten
from ripple_attention.convert import converted
from ripple_lab.align.learning import Features, Learning, features_of
from ripple_lab.align.lessons import Batch, check_teacher
from ripple_lab.align.processes import any_process, is_main, share_parameters
from ripple_lab.align.progress import AlignProgress
from ripple_lab.train.weights import CheckpointError, brief, misfit, read_weights, write_weights

Row = dict[str, Any]
MOMENTS = "optimizer."  # in front of the names of an optimizer's tensors
ANEW = "Start anew, without --resume, or remove it"
WARM_UP = 0.1  # of the steps


@dataclass(frozen=True)
class Stage:
    """A part of an alignment.

    Attributes:
        name: "ripples" (new parameters alone), "blocks" (their projections too) or "features" (the
            same, towards the teacher's features).
        steps: How many batches.
        rates: The largest, of new parameters and of projections where they learn; they rise for a
            tenth of the steps and fall to 0 as a cosine.
    """

    name: str
    steps: int
    rates: tuple[float, ...]

    def rates_at(self, step: int) -> list[float]:
        rising = min(1.0, (step + 1) / (WARM_UP * self.steps))  # Adam's first steps are its worst
        share = rising * (1 + math.cos(math.pi * step / self.steps)) / 2
        return [rate * share for rate in self.rates]


def align(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    *,
    steps: int = 150,
    block_steps: int = 0,
    feature_steps: int = 0,
    learning_rate: float = 1e-2,
    tuning_rate: float = 3e-5,
    features: Features = features_of,
    keep_lessons: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    seconds: float = math.inf,
    console: Console | None = None,
) -> list[Row]:
    """Teaches the ripples of a converted model to do what softmax did, without labels.

    First the scale of each block's far part is calibrated, unless it has learned already. Then each
    converted block learns its teacher's output from the teacher's input, all blocks of a batch in
    one pass of the teacher; new parameters alone, then, for `block_steps`, their projections too.
    For `feature_steps`, all of them learn the teacher's features at the end.

    On GPUs the blocks run under bfloat16 autocast. In a process group, each process takes its own
    batches and all keep the same parameters.

    Args:
        model: Converted; changed in place.
        teacher: The same model with softmax: a copy from before the conversion.
        batches: Normalised images (B, 3, H, W), or dictionaries for models that take names. Gone
            through again as often as the steps need; not an iterator.
        steps, block_steps, feature_steps: Batches of each part.
        learning_rate: Of new parameters; a third of it once projections learn, a tenth at the end.
        tuning_rate: Of projections.
        features: What of (model, batch) is to agree at the end: tensors, in lists or dictionaries.
        keep_lessons: Keep what the teacher's blocks took and gave for every batch, and its
            features, in memory: for batches in an order that stays, where its passes take long.
        checkpoint: A file from which a stopped alignment goes on; written whole or not at all.
        checkpoint_seconds: How often.
        seconds: Stop after so long; the same call goes on from the checkpoint.
        console: Where progress shows; nowhere unless given.

    Returns:
        A row for each step: stage, step, and the relative squared error of each block by its name,
        or of the "features".
    """
    check_count("steps", steps, 0)
    check_count("block_steps", block_steps, 0)
    check_count("feature_steps", feature_steps, 0)
    check_number("learning_rate", learning_rate, 0)
    check_number("tuning_rate", tuning_rate, 0)
    stages = (
        Stage("ripples", steps, (learning_rate,)),
        Stage("blocks", block_steps, (learning_rate / 3, tuning_rate)),
        Stage("features", feature_steps, (learning_rate / 10, tuning_rate)),
    )
    check_teacher(model, teacher)
    blocks = dict(converted(model))
    if not isinstance(batches, Iterable) or iter(batches) is batches:
        raise ValueError(
            "batches are gone through several times, so they must be a list or a DataLoader; got "
            f"{shorten(batches)}: list(…) makes one"
        )
    deadline = time.monotonic() + seconds
    weights, moments, rows = load(checkpoint, model)
    with nothing_else_changes(model, teacher), AlignProgress(console if is_main() else None) as bar:
        learn = Learning(model, teacher, features, keep_lessons)
        if weights:
            model.load_state_dict(weights, strict=False)
        else:
            learn.calibrate(batches)
        share_parameters(blocks)
        for stage in stages:
            done = sum(row["stage"] == stage.name for row in rows)
            if done >= stage.steps:
                continue
            groups = trainable(model, blocks, stage)
            trained = [p for group in groups for p in group]
            optimizer = torch.optim.AdamW([{"params": x} for x in groups], weight_decay=0.0)
            if done:
                resume(optimizer, moments, checkpoint)
            bar.begin(stage.name, stage.steps, done)
            saved = time.monotonic()
            try:
                for index, batch in itertools.islice(forever(batches), done, stage.steps):
                    rates = stage.rates_at(done)
                    for group, rate in zip(optimizer.param_groups, rates, strict=True):
                        group["lr"] = rate
                    end_to_end = stage.name == "features"
                    errors = learn(index, batch, optimizer, trained, end_to_end)
                    done += 1
                    rows.append({"stage": stage.name, "step": done, **errors})
                    bar.show(rows[-1])
                    if seconds < math.inf and any_process(time.monotonic() > deadline):
                        return rows
                    if time.monotonic() - saved > checkpoint_seconds:
                        save(checkpoint, model, optimizer, rows)
                        saved = time.monotonic()
            finally:
                save(checkpoint, model, optimizer, rows)
    return rows


@contextmanager
def nothing_else_changes(model: nn.Module, teacher: nn.Module) -> Iterator[None]:
    """Both models evaluate, and are in the end as trainable as they were."""
    both = (model, teacher)
    modes = {module: module.training for root in both for module in root.modules()}
    learns = {p: p.requires_grad for root in both for p in root.parameters()}
    for root in both:
        root.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learned in learns.items():
            parameter.requires_grad_(learned)


def trainable(model: nn.Module, blocks: dict[str, Any], stage: Stage) -> list[list[Tensor]]:
    """Marks and returns the parameters of a stage: new ones, and those of projections."""
    model.requires_grad_(False)
    for block in blocks.values():
        block.ripple.train()
    named = [pair for block in blocks.values() for pair in block.named_parameters()]
    new = [p for name, p in named if name.startswith("ripple.")]
    kept = [p for name, p in named if not name.startswith("ripple.")]
    groups = [new] if stage.name == "ripples" else [new, kept]
    return [[p.requires_grad_(True) for p in group] for group in groups]


def forever(batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
    """Batches and their numbers, again and again."""
    while True:
        number = -1
        for number, batch in enumerate(batches):
            yield number, batch
        if number < 0:
            raise ValueError("there are no batches to align on")


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """What an alignment changes: the blocks that hold ripples."""
    own = tuple(f"{name}." for name, _ in converted(model))
    return {name: x for name, x in model.state_dict().items() if name.startswith(own)}


def save(
    path: Path | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: list[Row],
) -> None:
    """Writes what an alignment has changed, whole or not at all."""
    if path is None or not is_main():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    moments = flat(optimizer.state_dict()["state"])
    write_weights(path, own_weights(model) | moments, {"rows": json.dumps(rows)})


def load(
    path: Path | None, model: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Row]]:
    """What `save` wrote of such a model: weights, the optimizer's moments, rows; else nothing."""
    if path is None or not path.exists():
        return {}, {}, []
    try:
        state, metadata = read_weights(path)
        rows = json.loads(metadata["rows"])
        assert all({"stage", "step"} <= row.keys() for row in rows)
    except Exception as error:  # of many kinds: the file may say anything
        raise CheckpointError(
            f"{path} is no checkpoint of `ripple align`: {brief(error)}. {ANEW}"
        ) from None
    moments = {name: state.pop(name) for name in [*state] if name.startswith(MOMENTS)}
    check_fit(path, own_weights(model), state)
    return state, moments, rows


def resume(optimizer: torch.optim.Optimizer, moments: dict[str, Tensor], path: Path | None) -> None:
    """Goes on with an optimizer's moments; a parameter without a gradient had none."""
    learned = [p for group in optimizer.param_groups for p in group["params"]]
    known = {
        i: {"step": torch.ones(()), "exp_avg": p, "exp_avg_sq": p}
        for i, p in enumerate(learned)
        if f"{MOMENTS}{i}.step" in moments
    }
    check_fit(path, flat(known), moments)
    state = {i: {name: moments[f"{MOMENTS}{i}.{name}"] for name in one} for i, one in known.items()}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def flat(state: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """An optimizer's state as tensors by name."""
    return {f"{MOMENTS}{i}.{name}": x for i, one in state.items() for name, x in one.items()}


def check_fit(path: Path | None, expected: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    if reason := misfit(expected, given):
        raise CheckpointError(f"{path} is of another model or conversion: {reason}. {ANEW}")
