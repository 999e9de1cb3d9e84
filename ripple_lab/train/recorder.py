"""What a run writes down: a line of metrics every few steps, as JSON lines, CSV and TensorBoard."""

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ripple_lab.files import naming_full_disk, parse_json, replace_text, write_csv
from ripple_lab.train.module import TrainedModule

Row = dict[str, Any]

METRICS = "metrics.jsonl"  # there from the first step on
TRAIN_NUMBERS = ("epoch", "gradient_norm", "gradient_norm_max", "images_per_second")


class DivergedError(RuntimeError):
    """A loss or a gradient that is no number."""


class Recorder(pl.Callback):
    """Keeps losses and gradient norms on the device and writes them down every few steps.

    Reading a number from a GPU waits for it; once every `log_every` steps that costs nothing.
    Gradient norms are those before clipping.

    Args:
        folder: Of the run; gets `metrics.jsonl`, `metrics.csv` and `tensorboard/`.
    """

    def __init__(self, folder: Path):
        self.path = folder / METRICS
        self.last: Row = {}
        self._folder = folder
        self._pending: list[dict[str, Tensor]] = []
        self._images = 0
        self._since = 0.0
        self._board: Any = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            forget_after(self.path, trainer.global_step)
            self._board = _board(self._folder / "tensorboard", trainer.global_step)
        self._since = time.perf_counter()

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        numbers = {name: value.detach() for name, value in outputs.items()}
        self._pending.append(numbers | {"gradient_norm": module.gradient_norm})
        self._images += len(batch[0]) * trainer.world_size
        if trainer.global_step % module.recipe.log_every == 0 or trainer.is_last_batch:
            self.flush(trainer, module)

    def flush(self, trainer: pl.Trainer, module: TrainedModule) -> None:
        """Writes down the steps since the last time.

        Raises:
            DivergedError: One of them has no finite loss, or no finite gradient.
        """
        if not self._pending:
            return
        names = list(self._pending[0])
        rows = [torch.stack([row[name].float() for name in names]) for row in self._pending]
        reduced = trainer.strategy.reduce(torch.stack(rows), reduce_op="mean")
        columns = dict(zip(names, reduced.T.tolist(), strict=True))
        norms = columns.pop("gradient_norm")
        seconds = time.perf_counter() - self._since
        first = trainer.global_step - len(norms) + 1
        _check_finite(columns["loss"], norms, first, module)
        self.last = {
            "kind": "train",
            "step": trainer.global_step,
            "epoch": trainer.global_step / trainer.num_training_batches,
            **{name: sum(column) / len(column) for name, column in columns.items()},
            "learning_rate": module.learning_rate_of_last_step(),
            "gradient_norm": sum(norms) / len(norms),
            "gradient_norm_max": max(norms),
            "images_per_second": self._images / seconds,
        }
        self._pending, self._images = [], 0
        self._since = time.perf_counter()
        if trainer.is_global_zero:
            self.write(self.last)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        damaged = torch.tensor(float(module.data.damaged), device=module.device)
        row = {
            "kind": "evaluation",
            "step": trainer.global_step,
            "epoch": trainer.global_step / max(1, trainer.num_training_batches),
            **module.metrics(),
            "damaged_images": int(trainer.strategy.reduce(damaged, reduce_op="sum")),
        }
        module.last_evaluation = row
        self._since = time.perf_counter()
        if trainer.is_global_zero:
            self.write(row)
            self.write_csv()

    def write(self, row: Row) -> None:
        append(self.path, row)
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self.path.exists():
            self.write_csv()

    def write_csv(self) -> None:
        write_csv(read_metrics(self.path), self.path.with_suffix(".csv"))


def append(path: Path, row: Row) -> None:
    """Adds a line to a file of JSON lines."""
    with naming_full_disk(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(path: Path) -> list[Row]:
    """The rows of a `metrics.jsonl`; a line that a killed run left unfinished is not one."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for row in map(_row, lines) if row is not None]


def _row(line: bytes) -> Row | None:
    """What a line says, if it is an object with a step and, of training, the numbers read here."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    needed = TRAIN_NUMBERS if row.get("kind") == "train" else ()
    return row if all(isinstance(row.get(name), int | float) for name in needed) else None


def forget_after(path: Path, step: int) -> None:
    """Leaves out the rows after a step: a resumed run makes those steps again."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def gradient_norms(metrics: Path, warmup_epochs: float) -> dict[str, float]:
    """Typical and largest norm of the gradient after the warm-up, and how many rows exceed 10."""
    rows = [row for row in read_metrics(metrics) if row.get("kind") == "train"]
    rows = [row for row in rows if row["epoch"] > warmup_epochs] or rows
    largest = [row["gradient_norm_max"] for row in rows]
    typical = sorted(row["gradient_norm"] for row in rows)
    return {
        "gradient_norm_median": typical[len(typical) // 2],
        "gradient_norm_max": max(largest),
        "gradient_norm_spikes": sum(norm > 10 for norm in largest),
    }


def _check_finite(
    losses: list[float], norms: list[float], first: int, module: TrainedModule
) -> None:
    # In float16 a gradient may overflow: the scaler then leaves the step out and goes on.
    watched = {"loss": losses}
    if module.recipe.hardware.precision != "16-mixed":
        watched["gradient norm"] = norms
    for number in range(len(losses)):
        for name, values in watched.items():
            if not math.isfinite(values[number]):
                raise DivergedError(
                    f"the {name} of step {first + number} is {values[number]}: training has "
                    "diverged and is stopped; no checkpoint after that step is written. "
                    "A new run (--output) with a lower optimizer.lr or clip may do better."
                )


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # tensorboard is not installed: the files are enough
        return None
    return SummaryWriter(folder, purge_step=step + 1)
