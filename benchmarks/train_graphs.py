"""Whole runs of `ripple train` with steps replayed as CUDA graphs and without, on one GPU.

    python benchmarks/train_graphs.py --check               # both give the same losses
    python benchmarks/train_graphs.py RESULTS.csv           # speed; adds rows to the file
    python benchmarks/train_graphs.py RESULTS.csv --compile # with hardware.compile

Two epochs of each recipe on random images in CIFAR-100's layout; the second one is timed: its
steps, as the metrics have them, and the whole of it, with evaluation. `kernels_ms` is a step
without data: its graph, clipping and the optimizer in a row, so that launches are hidden.
"""

import argparse
import csv
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ripple_lab.data.augment import Augmentation
from ripple_lab.files import write_csv
from ripple_lab.machine import hardware
from ripple_lab.recipes import find_recipe
from ripple_lab.train.classification import DataSpec, Mixing
from ripple_lab.train.classifier import Classifier
from ripple_lab.train.preemption import Safety, StoppedError
from ripple_lab.train.progress import RunProgress
from ripple_lab.train.recorder import read_metrics
from ripple_lab.train.run import train

NAMES = ("cifar100-ripple-tiny", "cifar100-deit-tiny", "cifar100-deit-la-tiny")
STEPS = 97  # of an epoch


def random_cifar100(folder: Path) -> None:
    """Files in the layout of CIFAR-100: 5,000 random images, again and again."""
    draw = np.random.default_rng(0)
    records = draw.integers(256, size=(5000, 2 + 3072), dtype=np.uint8)
    records[:, 1] %= 100
    for split, times in (("train", 10), ("test", 2)):
        np.tile(records, (times, 1)).tofile(folder / f"{split}.bin")
    (folder / "fine_label_names.txt").write_text("\n".join(f"class-{i}" for i in range(100)))


def run(folder: Path, recipe: Any, graphs: bool, stop: int | None = None) -> list[dict[str, Any]]:
    """Rows of the metrics; stopped after a step and resumed, if one is named."""
    recipe = replace(recipe, hardware=replace(recipe.hardware, graphs=graphs))
    console = Console(file=io.StringIO())
    if stop is not None:
        plain = Safety.on_train_batch_end

        def batch_end(self: Any, trainer: Any, *rest: Any) -> None:
            self._asked = int(trainer.global_step == stop)
            plain(self, trainer, *rest)

        Safety.on_train_batch_end = batch_end  # type: ignore[method-assign]
        try:
            train(recipe, folder, console)
        except StoppedError:
            pass
        finally:
            Safety.on_train_batch_end = plain  # type: ignore[method-assign]
    train(recipe, folder, console, resume=stop is not None)
    return read_metrics(folder / "metrics.jsonl")


def of_training(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == "train"]


def difference(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """The largest relative difference of losses."""
    pairs = zip(of_training(some), of_training(others), strict=True)
    return max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)


def timed(folder: Path, name: str, data: Path, graphs: bool, compiled: bool) -> dict[str, Any]:
    recipe = find_recipe(name)
    recipe = replace(
        recipe,
        data=replace(recipe.data, root=str(data)),
        epochs=2,
        optimizer=replace(recipe.optimizer, warmup_epochs=1),
        hardware=replace(recipe.hardware, accelerator="cuda", compile=compiled),
    )
    ends, parts = [], {}
    plain_end, plain_start = RunProgress.on_train_epoch_end, Classifier.on_train_end

    def epoch_end(self: Any, *rest: Any) -> None:
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        plain_end(self, *rest)

    RunProgress.on_train_epoch_end = epoch_end  # type: ignore[method-assign]
    Classifier.on_train_end = lambda self: parts.update(measure_parts(self))  # type: ignore
    try:
        rows = run(folder, recipe, graphs)
    finally:
        RunProgress.on_train_epoch_end = plain_end  # type: ignore[method-assign]
        Classifier.on_train_end = plain_start  # type: ignore[method-assign]
    steps, seconds, last = 0, 0.0, STEPS
    for row in of_training(rows):
        if row["step"] > STEPS:
            count = row["step"] - last
            steps, last = steps + count, row["step"]
            seconds += count * recipe.batch_size / row["images_per_second"]
    row = {
        "hardware": hardware(torch.device("cuda")),
        "recipe": name,
        "compiled": compiled,
        "graphs": graphs,
        "batch": recipe.batch_size,
        "steps_timed": steps,
        "step_ms": 1e3 * seconds / steps,
        "images_per_second": steps * recipe.batch_size / seconds,
        "whole_epoch_images_per_second": STEPS * recipe.batch_size / (ends[1] - ends[0]),
        **parts,
    }
    return {"row": row, "metrics": rows}


def measure_parts(module: Any) -> dict[str, float]:
    """Of a run that ends: a step without its data, and its share of augmentation."""
    loader = module.trainer.train_dataloader
    images = loader.images[:8192]
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loader.augment(images, generator)
        launched = time.perf_counter() - start
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start, launched))
    whole, launched = (1e3 * x / 16 for x in min(times))
    parts = {"augmentation_ms": whole, "augmentation_launched_ms": launched}
    if module._graph is not None:
        optimizer = module.optimizers().optimizer
        parts["kernels_ms"] = kernels_ms(module, optimizer)
    return parts


def kernels_ms(module: Any, optimizer: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for count in (3, 30):
        start.record()
        for _ in range(count):
            module._graph._replay()
            module.configure_gradient_clipping(optimizer)
            optimizer.step()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 30


def check(folder: Path, name: str) -> str:
    """Losses of ten steps at full size: replayed, not replayed, cut and resumed."""
    recipe = find_recipe(name)
    recipe = replace(
        recipe,
        data=DataSpec("synthetic", num_classes=100, count=5120),
        epochs=1,
        log_every=1,
        optimizer=replace(recipe.optimizer, warmup_epochs=0),
        hardware=replace(recipe.hardware, accelerator="cuda"),
    )
    none = Augmentation("none", flip=0.0, auto_augment=None, color_jitter=0, erasing=0)
    plain = replace(
        recipe,
        augmentation=none,
        mixing=Mixing(mixup=0.0, cutmix=0.0),
        model=replace(recipe.model, drop_path=0.0),
    )
    runs = {
        "replayed": run(folder / "a", recipe, True),
        "eager": run(folder / "b", recipe, False),
        "resumed": run(folder / "c", recipe, True, stop=4),
        "replayed, plain": run(folder / "d", plain, True),
        "eager, plain": run(folder / "e", plain, False),
    }
    losses = [row["loss"] for row in of_training(runs["replayed"])]
    return (
        f"{name}: losses {losses[0]:.5f} … {losses[-1]:.5f}; largest relative difference of "
        f"replayed and eager {difference(runs['replayed'], runs['eager']):.2g}, without drawing "
        f"{difference(runs['replayed, plain'], runs['eager, plain']):.2g}, "
        f"of resumed and whole {difference(runs['replayed'], runs['resumed']):.2g}"
    )


def compare(folder: Path, path: Path, names: list[str], compiled: bool) -> None:
    """Times all recipes, writes rows as they come and prints them."""
    data = folder / "data"
    data.mkdir()
    random_cifar100(data)
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open() as file:
            rows = list(csv.DictReader(file))
    metrics = {}
    for graphs in (True, False):
        for name in names:
            found = timed(folder / f"{name}-{graphs}", name, data, graphs, compiled)
            metrics[name, graphs] = found["metrics"]
            row = found["row"]
            row = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
            if not graphs:
                row["losses_differ_by"] = difference(metrics[name, True], metrics[name, False])
            rows.append(row)
            write_csv(rows, path)
            print({k: v for k, v in row.items() if k not in ("hardware", "batch")}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path, nargs="?", default=Path("train-graphs.csv"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default=",".join(NAMES))
    options = parser.parse_args()
    names = options.only.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.check:
            for name in names:
                print(check(folder / name, name), flush=True)
        else:
            compare(folder, options.results, names, options.compile)


if __name__ == "__main__":
    main()
