"""How far an alignment is, with the error of each block: a bar, or lines off a screen."""

from collections import deque
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

RECENT = 20  # steps that a shown error is the mean of
LINES = 10  # that a stage writes off a screen


class AlignProgress:
    """Shows the steps of one stage after another.

    Args:
        console: Where to; None shows nothing.
    """

    def __init__(self, console: Console | None):
        self.console = console
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.bar: Progress | None = None

    def __enter__(self) -> "AlignProgress":
        if self.console is not None and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[errors]}"),
                console=self.console,
            )
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def begin(self, stage: str, steps: int, done: int) -> None:
        self.steps = steps
        self.recent.clear()
        if self.bar is not None:
            self.task = self.bar.add_task(stage, total=steps, completed=done, errors="")

    def show(self, row: dict[str, Any]) -> None:
        """Takes the row of a step."""
        self.recent.append({k: v for k, v in row.items() if k not in ("stage", "step")})
        means = {
            name: sum(recent[name] for recent in self.recent) / len(self.recent)
            for name in self.recent[-1]
        }
        errors = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        if self.bar is not None:
            self.bar.update(self.task, completed=row["step"], errors=errors)
        elif self.console is not None and row["step"] % max(self.steps // LINES, 1) == 0:
            line = f"{row['stage']} {row['step']}/{self.steps}: {errors}"
            self.console.print(line, highlight=False, soft_wrap=True)
