"""Checkpoints: a folder each, whole or not there at all, read without executing anything."""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ripple_lab.console import did_you_mean
from ripple_lab.files import naming_full_disk, parse_json, replace_text, replacing
from ripple_lab.text import check_names
from ripple_lab.train.recipe import Recipe
from ripple_lab.train.weights import CheckpointError, brief, read_weights, write_weights

# Files of weights, and what their names begin with in the state of a `TrainedModule`.
WEIGHTS = {"model.safetensors": "model.", "ema.safetensors": "ema.module."}
TRAINER = "trainer.pt"
CHECKSUMS = "SHA256SUMS"  # of the others, as the command sha256sum writes it
# A classifier of CIFAR-100 that comes with the package; its card lies beside it.
EMBEDDED = Path(__file__).parents[1] / "weights" / "cifar100.safetensors"
KEEP = 2


class CheckpointFolders:
    """Reads and writes Lightning's checkpoints as folders, as its `CheckpointIO` demands.

    `model.safetensors` and `ema.safetensors` hold the weights, with the recipe and the names of the
    classes in their metadata; `trainer.pt` holds the state of optimiser, schedule and loops;
    `SHA256SUMS` the checksums of these files, without which none of them is used. A folder is
    written under another name and then renamed: a checkpoint that is there was whole.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        folder = Path(path)
        if folder.exists():  # of the same step, and renamed only when it was whole
            return
        partial = folder.with_name(f".partial-{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _write_files(checkpoint, partial)
            partial.rename(folder)
        except BaseException:  # of a full disk above all, which it would keep full
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _flush(folder.parent)

    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True
    ) -> dict[str, Any]:
        folder = Path(path)
        check_files(folder)
        file = folder / TRAINER
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            state = checkpoint.pop("state")
        except Exception as error:  # of many kinds: the file may say anything
            raise CheckpointError(
                f"{file} is not the trainer's state as `ripple train` writes it: {brief(error)}"
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


def describe(recipe: Recipe, classes: tuple[str, ...]) -> dict[str, str]:
    """The metadata of a file of weights."""
    return {"recipe": recipe.to_json(), "classes": json.dumps(classes)}


def read_model(path: Path) -> tuple[dict[str, Tensor], Recipe, tuple[str, ...]]:
    """Weights, and the recipe and the classes that they were trained with."""
    weights, metadata = read_weights(path)
    if not {"recipe", "classes"} <= metadata.keys():
        raise CheckpointError(
            f"{path} does not say how it was trained: it was not written by `ripple train`. "
            "To use its weights alone, load them with timm.create_model(name, checkpoint_path=…)"
        )
    recipe = Recipe.from_json(metadata["recipe"], f"the metadata of {path}")
    classes = _read_classes(metadata["classes"], path)
    check_names(classes, recipe.data.num_classes, str(path))
    if "checksum" not in metadata:  # Python shows the same warning once
        warnings.warn(
            f"{path} has no checksum, so damage to it would go unnoticed: it was written by "
            "another program, or by ripple-attention 0.1",
            stacklevel=2,
        )
    return weights, recipe, classes


def read_description(path: Path) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe and the classes that a file of weights was trained with."""
    _, recipe, classes = read_model(path)
    return recipe, classes


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
        classes = parse_json(text)
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


def check_files(folder: Path) -> None:
    """Refuses a checkpoint of which a file is missing, or is not as it was written."""
    path = folder / CHECKSUMS
    try:
        for file in folder.iterdir():
            if not file.is_file():  # a pipe would be waited for
                raise CheckpointError(f"{file} is missing, or no file")
        written, found = path.read_bytes().decode(errors="replace"), checksums(folder)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder} cannot be read ({error.strerror}), so nobody knows "
            f"whether {folder} is whole. Version 0.1 wrote no {CHECKSUMS}: where you trust the "
            f"files, `cd {folder} && sha256sum * > {CHECKSUMS}` makes it"
        ) from None
    if written == found:
        return
    differing = {line[66:] for line in set(written.splitlines()) ^ set(found.splitlines())}
    for name in sorted(differing.intersection((*WEIGHTS, TRAINER))):
        state = f"does not match its checksum in {path}"
        raise CheckpointError(
            f"{folder / name} {state if (folder / name).exists() else 'is missing'}"
        )
    raise CheckpointError(f"{path} is damaged")


def checksums(folder: Path) -> str:
    """The SHA-256 of the files of a checkpoint, as the command sha256sum prints it."""
    lines = []
    for name in sorted((*WEIGHTS, TRAINER)):
        if (folder / name).exists():
            with (folder / name).open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def _write_files(checkpoint: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    trainer = dict(checkpoint)
    metadata, state = trainer.pop("metadata"), trainer.pop("state_dict")
    for name, prefix in WEIGHTS.items():
        own = {key for key in state if key.startswith(prefix)}
        weights = {key.removeprefix(prefix): state.pop(key) for key in sorted(own)}
        if weights:
            write_weights(folder / name, weights, metadata)
    content = BytesIO()  # a full disk then has an error of its own, not torch's
    torch.save(trainer | {"state": state}, content)
    with replacing(folder / TRAINER) as partial:
        partial.write_bytes(content.getbuffer())
    replace_text(folder / CHECKSUMS, checksums(folder))
    for file in folder.iterdir():
        _flush(file)


def _flush(path: Path) -> None:
    """Waits until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming_full_disk(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
