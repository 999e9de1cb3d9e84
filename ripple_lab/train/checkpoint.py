"""Checkpoints: a folder each, whole or not there at all, read without executing anything."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ripple_lab.console import did_you_mean
from ripple_lab.files import replacing
from ripple_lab.train.recipe import Recipe

# Files of weights, and what their names begin with in the state of a `TrainedModule`.
WEIGHTS = {"model.safetensors": "model.", "ema.safetensors": "ema.module."}
TRAINER = "trainer.pt"
# A classifier of CIFAR-100 that comes with the package; its card lies beside it.
EMBEDDED = Path(__file__).parents[1] / "weights" / "cifar100.safetensors"
KEEP = 2


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read: which, why, and what to do."""


class CheckpointFolders:
    """Reads and writes Lightning's checkpoints as folders, as its `CheckpointIO` demands.

    `model.safetensors` and `ema.safetensors` hold the weights, with the recipe and the names of the
    classes in their metadata; `trainer.pt` holds the state of optimiser, schedule and loops. A
    folder is written under another name and then renamed: a checkpoint that is there is whole.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        folder = Path(path)
        if folder.exists():  # of the same step, and renamed only when it was whole
            return
        partial = folder.with_name(f".partial-{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        trainer = dict(checkpoint)
        metadata, state = trainer.pop("metadata"), trainer.pop("state_dict")
        for name, prefix in WEIGHTS.items():
            own = {key for key in state if key.startswith(prefix)}
            weights = {key.removeprefix(prefix): state.pop(key) for key in sorted(own)}
            if weights:
                write_weights(partial / name, weights, metadata)
        torch.save(trainer | {"state": state}, partial / TRAINER)
        for file in partial.iterdir():
            _flush(file)
        partial.rename(folder)
        _flush(folder.parent)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        folder = Path(path)
        file = folder / TRAINER
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            state = checkpoint.pop("state")
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{file} is not the trainer's state as `ripple train` writes it: {_brief(error)}"
            ) from None
        for name, prefix in WEIGHTS.items():
            if (folder / name).exists():
                weights, _ = read_weights(folder / name)
                state |= {prefix + key: value for key, value in weights.items()}
        return checkpoint | {"state_dict": state}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path, ignore_errors=True)


def folder_of_step(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def steps_kept(checkpoints: Path) -> Iterator[int]:
    """The steps of the checkpoints in a folder, the latest first."""
    names = [path.name for path in checkpoints.glob("step-*")]
    yield from sorted((int(n[5:]) for n in names if re.fullmatch(r"step-\d{8,}", n)), reverse=True)


def tidy(checkpoints: Path, keep: int = KEEP) -> None:
    """Removes what a killed run left half-written, and all but the latest checkpoints."""
    for path in checkpoints.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)
    for step in list(steps_kept(checkpoints))[keep:]:
        shutil.rmtree(folder_of_step(checkpoints, step), ignore_errors=True)


def write_weights(path: Path, weights: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Weights with what is needed to use them: a model by itself."""
    whole = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    with replacing(path) as partial:  # `whole` may be a view of the file as it was
        partial.write_bytes(save(whole, metadata=metadata))


def describe(recipe: Recipe, classes: tuple[str, ...]) -> dict[str, str]:
    """The metadata of a file of weights."""
    return {"recipe": recipe.to_json(), "classes": json.dumps(classes)}


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and metadata as `write_weights` wrote them."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors, it may be cut short: {_brief(error)}"
        ) from None


def read_description(path: Path) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe and the classes that a file of weights was trained with."""
    _, metadata = read_weights(path)
    if not {"recipe", "classes"} <= metadata.keys():
        raise CheckpointError(
            f"{path} does not say how it was trained: it was not written by `ripple train`. "
            "To use its weights alone, load them with timm.create_model(name, checkpoint_path=…)"
        )
    recipe = Recipe.from_json(metadata["recipe"], f"the metadata of {path}")
    return recipe, _read_classes(metadata["classes"], path)


def find_weights(path: Path, ema: bool = False) -> Path:
    """The file of weights that a person means: a file, a checkpoint's folder or a run's.

    `embedded` is the one that comes with the package.
    """
    plain, mean = WEIGHTS
    name = mean if ema else plain
    if path.is_file():
        return path
    no_mean = f"{path} has no running mean of the weights, {name}: leave out --ema"
    if path == Path("embedded") and not path.exists():
        if ema:
            raise CheckpointError(no_mean)
        return EMBEDDED
    candidates = [path / name]
    checkpoints = path / "checkpoints"
    candidates += [folder_of_step(checkpoints, step) / name for step in steps_kept(checkpoints)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if ema and any(candidate.with_name(plain).is_file() for candidate in candidates):
        raise CheckpointError(no_mean)
    there = "" if path.exists() else f": it does not exist. {did_you_mean(str(path), ['embedded'])}"
    raise CheckpointError(
        f"a checkpoint is a .safetensors file, a folder of a run that holds {name}, or `embedded`; "
        f"{path} is none of these{there}".rstrip(". ")
    )


def _read_classes(text: str, path: Path) -> tuple[str, ...]:
    try:
        classes = json.loads(text)
        names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        reason = "" if names else f"it begins with {text[:20]!r}"
    except ValueError as error:
        reason = str(error)
    if reason:
        raise CheckpointError(
            "the entry `classes` in the metadata of a model is a JSON list of names; that of "
            f"{path} is not ({reason}): take the file as `ripple train` or `ripple pack` wrote it"
        )
    return tuple(classes)


def _flush(path: Path) -> None:
    """Waits until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
