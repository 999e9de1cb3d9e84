"""Checkpoints in time, and a clean stop when a run is told to end."""

import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from ripple_lab.train.checkpoint import folder_of_step, tidy
from ripple_lab.train.recorder import Recorder

TIME_IS_UP = 1000  # no signal has this number


class StoppedError(Exception):
    """A run that ended early, with a checkpoint.

    Attributes:
        signal_number: What ended it; `TIME_IS_UP` for its own time limit.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.signal_number = signal_number


class Preemption(pl.Callback):
    """Writes a checkpoint every so many minutes, at the end, and before a run that must end does.

    SIGTERM, SIGHUP, Ctrl-C and the time limit of the recipe end a run after the step that it is at.
    Several processes decide together, every `log_every` steps. A second Ctrl-C waits for nothing.

    Args:
        checkpoints: The folder that holds them.
        recorder: Has to find the losses sound before a checkpoint is written.
        started: When the run was started, by `time.monotonic`.
    """

    def __init__(self, checkpoints: Path, recorder: Recorder, started: float):
        self._checkpoints, self._recorder, self._started = checkpoints, recorder, started
        self._saved = time.monotonic()
        self._asked = 0
        self._handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):
                number = getattr(signal, name, None)  # Windows has no SIGHUP; nohup ignores it
                if number and signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked == number == signal.SIGINT:
            raise StoppedError("Stopped at once, without a checkpoint.", signal.SIGINT)
        self._asked = number

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        minutes = module.recipe.hardware.stop_after_minutes
        if minutes is not None and time.monotonic() - self._started > 60 * minutes:
            self._asked = self._asked or TIME_IS_UP
        together = trainer.world_size == 1 or trainer.global_step % module.recipe.log_every == 0
        # After the last step of an epoch comes an evaluation, and then `on_train_epoch_end`.
        if together and not trainer.is_last_batch:
            self._act(trainer, module)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._act(trainer, module, finished=trainer.current_epoch + 1 == trainer.max_epochs)

    def _act(self, trainer: pl.Trainer, module: Any, finished: bool = False) -> None:
        minutes = (time.monotonic() - self._saved) / 60
        due = minutes >= module.recipe.checkpoint_minutes
        asked = self._asked
        if trainer.world_size > 1:
            wishes = torch.tensor([asked, int(due)], device=module.device)
            torch.distributed.all_reduce(wishes, torch.distributed.ReduceOp.MAX)
            asked, due = wishes.tolist()
        if not (asked or due or finished):
            return
        self._recorder.flush(trainer, module)
        folder = folder_of_step(self._checkpoints, trainer.global_step)
        trainer.save_checkpoint(folder)
        if trainer.is_global_zero:
            tidy(self._checkpoints)
        self._saved = time.monotonic()
        if asked and not finished:
            why = "its time is up" if asked == TIME_IS_UP else "it was told to"
            raise StoppedError(
                f"Stopped at step {trainer.global_step} because {why}; the checkpoint is {folder}.",
                signal_number=asked,
            )

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
