"""A training run from a recipe, in a folder of its own."""

import json
import logging
import os
import shutil
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table

from ripple_lab.data.images import DataError
from ripple_lab.files import naming_full_disk, parse_json, replace_text, replacing
from ripple_lab.machine import hardware
from ripple_lab.train.checkpoint import (
    WEIGHTS,
    CheckpointError,
    CheckpointFolders,
    folder_of_step,
    read_description,
    steps_kept,
    tidy,
)
from ripple_lab.train.environment import environment
from ripple_lab.train.lock import only_process_in
from ripple_lab.train.module import TrainedModule
from ripple_lab.train.preemption import Preemption
from ripple_lab.train.progress import RunProgress
from ripple_lab.train.recipe import MAY_CHANGE, Recipe, differences
from ripple_lab.train.recorder import (
    METRICS,
    Recorder,
    gradient_norms,
    read_metrics,
)
from ripple_lab.train.results import read_result
from ripple_lab.train.ripples import RippleProfiles, has_ripples


class LightningCheckpoints(CheckpointFolders, CheckpointIO):
    """The folders, as a plugin."""


def train(recipe: Recipe, folder: Path, console: Console, resume: bool = False) -> dict[str, Any]:
    """Trains a recipe to its end and evaluates it.

    The folder gets `recipe.json`, `environment.json`, `metrics.jsonl`, `metrics.csv`,
    `tensorboard/`, `checkpoints/`, and at the end `model.safetensors` (with `ema.safetensors`, if
    the recipe keeps a mean) and `result.json`.

    Args:
        recipe: What to train.
        folder: Of the run; new, or to be gone on with.
        console: Where progress is shown.
        resume: Go on from the last good checkpoint, if there is one.

    Returns:
        What `result.json` holds.
    """
    if folder.is_file():
        raise ValueError(f"--output names a folder; {folder} is a file")
    main = is_main_process()
    if resume and (folder / "result.json").exists():
        return _ended(recipe, folder, console)
    with naming_full_disk(folder), only_process_in(folder) if main else nullcontext():
        if main and resume and (folder / "result.json").exists():  # while the lock was waited for
            return _ended(recipe, folder, console)
        return _train(recipe, folder, console, resume)


def _ended(recipe: Recipe, folder: Path, console: Console) -> dict[str, Any]:
    """The result of a run that has one."""
    if is_main_process():
        _refuse_another_run(recipe, folder, resume=True)
    console.print(f"The run in {folder} has ended.", highlight=False, soft_wrap=True)
    return read_result(folder / "result.json")


def _train(recipe: Recipe, folder: Path, console: Console, resume: bool) -> dict[str, Any]:
    started = time.monotonic()
    main = is_main_process()
    if main:
        _refuse_another_run(recipe, folder, resume)
    checkpoints = folder / "checkpoints"
    checkpoint = last_good_checkpoint(checkpoints) if resume else None
    if main and checkpoint:
        console.print(f"Going on from {checkpoint}", highlight=False, soft_wrap=True)

    pl.seed_everything(recipe.seed, verbose=False)
    module = recipe.create_module()
    data = module.data
    if main:
        data.setup("fit")  # what is missing is found before there is a folder
        if checkpoint:
            _refuse_other_classes(data.classes, checkpoint, recipe)
        _begin(recipe, folder)
    recorder = Recorder(folder)
    preemption = Preemption(checkpoints, recorder, started)
    callbacks: list[pl.Callback] = [recorder, RunProgress(console, recorder)]
    if has_ripples(module.model):
        callbacks.append(RippleProfiles(folder, recorder))
    trainer = create_trainer(recipe, [*callbacks, preemption])  # which may stop the run, at the end
    try:
        trainer.fit(module, ckpt_path=checkpoint)
        if module.last_evaluation.get("step") != trainer.global_step:
            trainer.validate(module, verbose=False)
    finally:
        if main:
            recorder.close()
    result = _result(recipe, folder, trainer, module, started)
    if main:
        final = folder_of_step(checkpoints, trainer.global_step)
        for name in WEIGHTS:
            if (final / name).exists():
                with replacing(folder / name) as partial:
                    shutil.copyfile(final / name, partial)
        replace_text(folder / "result.json", json.dumps(result, indent=2) + "\n")
        console.print(summary(result))
    return result


def is_main_process() -> bool:
    """Whether this is the first process of a run, as its launcher says: before they have met."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
    return all(int(os.environ.get(name, 0)) == 0 for name in names)


def create_trainer(recipe: Recipe, callbacks: list[pl.Callback]) -> pl.Trainer:
    """Lightning's trainer for the hardware of a recipe."""
    machine = recipe.hardware
    several = machine.devices * machine.nodes > 1
    # Advice that does not apply: our loaders divide and resume by themselves, on purpose.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    warnings.filterwarnings("ignore", ".*module.s. in eval mode.*")  # the mean of the weights
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's own use of torch
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    try:
        return _trainer(recipe, callbacks, "ddp" if several else "auto")
    except MisconfigurationException as error:
        raise ValueError(
            f"hardware.accelerator={machine.accelerator!r} with {machine.devices} devices cannot "
            f"be had here: {str(error).splitlines()[0]}"
        ) from None


def _trainer(recipe: Recipe, callbacks: list[pl.Callback], strategy: str) -> pl.Trainer:
    machine = recipe.hardware
    return pl.Trainer(
        accelerator=machine.accelerator,
        devices=machine.devices,
        num_nodes=machine.nodes,
        strategy=strategy,
        precision=machine.precision,
        max_epochs=recipe.epochs,
        check_val_every_n_epoch=recipe.validate_every,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        plugins=[LightningCheckpoints()],
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def last_good_checkpoint(checkpoints: Path) -> Path | None:
    """The latest checkpoint that can be read; None where there is none."""
    kept = list(steps_kept(checkpoints))
    reasons = []
    for step in kept:
        folder = folder_of_step(checkpoints, step)
        try:
            CheckpointFolders().load_checkpoint(folder)
        except CheckpointError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warnings.warn(f"{reason}. Going back to {folder}.", stacklevel=2)
        if is_main_process():  # they will be written again
            for damaged in kept[: len(reasons)]:
                shutil.rmtree(folder_of_step(checkpoints, damaged), ignore_errors=True)
        return folder
    if reasons:
        raise CheckpointError(
            f"no checkpoint in {checkpoints} can be read: {'; '.join(reasons)}. "
            "Remove the folder of the run to start anew"
        )
    return None


def _refuse_another_run(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Finds out whether the folder holds a run, and this one."""
    written = folder / "recipe.json"
    if (folder / METRICS).exists():
        if not resume:
            raise ValueError(
                f"{folder} holds a run already: --resume goes on with it, --output names another "
                "folder"
            )
        if not written.exists():
            raise ValueError(f"{written} is missing: without it the run in {folder} cannot go on")
        changed = differences(Recipe.read(written), recipe, MAY_CHANGE)
        if changed:
            raise ValueError(
                f"the run in {folder} has another recipe, so it cannot go on with this one "
                f"({'; '.join(changed)}); give it the same fields, or another --output"
            )


def _refuse_other_classes(classes: tuple[str, ...], checkpoint: Path, recipe: Recipe) -> None:
    """The data may lie elsewhere when a run goes on, but a label must mean what it meant."""
    _, before = read_description(checkpoint / "model.safetensors")
    if classes != before:
        raise DataError(
            f"a run goes on with the classes it began with, {', '.join(before[:3])}, …; those in "
            f"{recipe.data.root} are {', '.join(classes[:3])}, …: name the same data, --data.root"
        )


def _begin(recipe: Recipe, folder: Path) -> None:
    """Writes what a run starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder / "checkpoints")
    replace_text(folder / "recipe.json", recipe.to_json() + "\n")
    path = folder / "environment.json"
    try:
        before = parse_json(path.read_bytes()) if path.exists() else []
        if not isinstance(before, list):
            raise ValueError
    except ValueError:
        warnings.warn(f"{path} is damaged and starts anew", stacklevel=2)
        before = []
    replace_text(path, json.dumps([*before, environment()], indent=2) + "\n")


def _result(
    recipe: Recipe, folder: Path, trainer: pl.Trainer, module: TrainedModule, started: float
) -> dict[str, Any]:
    """One line of results; speed is that of a typical row, not slowed by the first ones."""
    metrics = folder / METRICS
    rates = sorted(
        row["images_per_second"] for row in read_metrics(metrics) if row.get("kind") == "train"
    )
    metrics_of_last = dict(module.last_evaluation)
    for name in ("kind", "step", "epoch"):
        metrics_of_last.pop(name)
    return {
        "recipe": recipe.name,
        "seed": recipe.seed,
        "epochs": recipe.epochs,
        "steps": trainer.global_step,
        **metrics_of_last,
        **(gradient_norms(metrics, recipe.optimizer.warmup_epochs) if rates else {}),
        "images_per_second": rates[len(rates) // 2] if rates else None,
        "minutes_of_last_session": (time.monotonic() - started) / 60,
        "hardware": hardware(trainer.strategy.root_device),
        "devices": trainer.world_size,
    }


def summary(result: dict[str, Any]) -> Table:
    """The final table of a run."""
    table = Table(title=result["recipe"], title_justify="left", show_header=False)
    for name, value in result.items():
        if name != "recipe" and value is not None:
            shown = f"{value:,.3f}" if isinstance(value, float) else str(value)
            table.add_row(name.replace("_", " "), shown)
    return table
