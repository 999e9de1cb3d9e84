"""What all commands share: how they speak, and how they refuse and stop."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ripple_lab.text import plain


class PlainConsole(Console):
    """A console on which text is text, also in tables: it shows markup and control characters."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text, keep="\n"), **options)


console = PlainConsole()
errors = PlainConsole(stderr=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str = "",
    lineno: int = 0,
    *_: Any,
    **__: Any,
) -> None:
    """Stands in for `warnings.showwarning`: warnings name files, too."""
    errors.print(f"{category.__name__}: {message}", style="yellow", soft_wrap=True)


class Commands(TyperGroup):
    """Commands that Ctrl-C ends with one line and the exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            stopped()
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning's way to stop
                stopped()
            raise


def stopped() -> NoReturn:
    errors.print("Stopped.", style="yellow")
    raise typer.Exit(130)


def did_you_mean(name: str, known: Iterable[str], words: bool = False) -> str:
    """The names that are near another one; nothing where none is.

    Args:
        name: What is not known.
        known: What is.
        words: Words of names do, too, where no whole one is near: a part of a name was asked for.

    >>> did_you_mean("trian", ["train", "evaluate"])
    'did you mean train? '
    >>> did_you_mean("riple", ["Ripple_tiny_patch16", "DeiT_tiny_patch16"])
    ''
    >>> did_you_mean("riple", ["Ripple_tiny_patch16", "DeiT_tiny_patch16"], words=True)
    'did you mean Ripple? '
    >>> did_you_mean("x", ["train", "evaluate"])
    ''
    """
    names = {other.lower(): other for other in known}
    parts = [word for other in names.values() if words for word in re.split(r"[\W_]+", other)]
    for kind in (names, {word.lower(): word for word in parts}):
        near = [kind[found] for found in difflib.get_close_matches(name.lower(), kind)]
        if near:
            return f"did you mean {', '.join(near)}? "
    return ""


def check_device(name: str) -> str:
    """A device, "" for the best there is; refuses one that is not known, or not there."""
    kind = name.partition(":")[0]
    if kind not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda; got {name!r}")
    if kind == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return name or "cuda"
    if name:
        raise typer.BadParameter(
            f"--device {name} needs a GPU, and PyTorch sees none here: take --device cpu"
        )
    return "cpu"
