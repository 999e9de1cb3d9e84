"""The progress of a run: a bar with rate and time left; off a screen, a line for each epoch."""

from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ripple_lab.train.recorder import Recorder


class Bar(pl.Callback):
    """A bar that is taken off the screen whatever happens, the cursor shown again.

    Args:
        console: Where it is.
    """

    def __init__(self, console: Console):
        self.console = console
        self._bar: Progress | None = None

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = teardown


class EvaluationProgress(Bar):
    """Shows how far an evaluation is, on a screen."""

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.is_global_zero and self.console.is_terminal:
            columns = TextColumn("batches"), BarColumn(), MofNCompleteColumn()
            self._bar = Progress(
                *columns, TimeRemainingColumn(), console=self.console, transient=True
            )
            self._task = self._bar.add_task("batches", total=sum(trainer.num_val_batches))
            self._bar.start()

    def on_validation_batch_end(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)


class RunProgress(Bar):
    """Shows how far a run is.

    Args:
        console: Where to.
        recorder: Knows the last loss and rate.
    """

    def __init__(self, console: Console, recorder: Recorder):
        super().__init__(console)
        self.recorder = recorder

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.is_global_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} images/s, loss {task.fields[loss]}, left:"),
            TimeRemainingColumn(),
            console=self.console,
        )
        steps = int(trainer.estimated_stepping_batches)
        fields = {"epoch": "–", "rate": "–", "loss": "–"}
        done = trainer.global_step
        self._task = self._bar.add_task("steps", total=steps, completed=done, **fields)  # type: ignore[arg-type]
        self._bar.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self._bar is not None:
            last = self.recorder.last
            self._bar.update(
                self._task,
                completed=trainer.global_step,
                epoch=f"{trainer.current_epoch + 1}/{trainer.max_epochs}",
                rate=f"{last['images_per_second']:,.0f}" if last else "–",
                loss=f"{last['loss']:.3f}" if last else "–",
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        last, evaluation = self.recorder.last, module.last_evaluation
        if not trainer.is_global_zero or not last:
            return
        line = (
            f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, step {trainer.global_step}: "
            f"loss {last['loss']:.3f}, {last['images_per_second']:,.0f} images/s"
        )
        if evaluation and evaluation["step"] == trainer.global_step:
            line += "".join(f", {name} {value}" for name, value in module.shown(evaluation).items())
        self.console.print(line, highlight=False, soft_wrap=True)
