"""The command `ripple`."""

import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ripple_lab.commands import convert, inspection, train
from ripple_lab.commands.bench import bench
from ripple_lab.console import Commands, check_device, console, did_you_mean, errors, show_warning

# The extra that brings a package. `app` brings what its command needs, `demo` all the rest.
EXTRAS = {"faster_coco_eval": "detection"}

app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(bench, name="bench")
app.command(context_settings={**train.EXTRA, "help_option_names": []})(train.train)
app.command(context_settings=train.EXTRA)(train.evaluate)
app.command()(train.predict)
app.command()(train.results)
app.command()(train.pack)
app.command()(convert.convert)
app.command()(convert.align)
app.command()(inspection.explain)
app.command()(inspection.analyze)
app.command(name="app")(inspection.app)


def _version(asked: bool) -> None:
    if asked:
        console.print(version("ripple-attention"), highlight=False)
        raise typer.Exit


@app.callback()
def ripple(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Ripple attention: local where it pays, global everywhere.

    Example: ripple demo
    """


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the run and the picture.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the digits.")] = None,
) -> None:
    """Train a small classifier on digits and draw its ripples.

    Example: ripple demo --epochs 3
    """
    from ripple_lab.demo import run

    with train.one_line_when_stopped("The same command goes on."):
        run(output, epochs, console)


@app.command()
def picture(
    path: Annotated[Path, typer.Argument(help="The picture to write, .png or .svg.")],
) -> None:
    """Draw what ripple attention is.

    Example: ripple picture ripples.png
    """
    from ripple_lab.plots import draw_explanation

    draw_explanation(path)
    console.print(f"Wrote {path}")


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="table1 … table8, figure-…, or all.")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of the pages and figures.")] = Path(
        "reproduced"
    ),
    results: Annotated[
        Path | None, typer.Option(help="Folder of result files. Default: ours.")
    ] = None,
) -> None:
    """Show the paper's tables and figures beside ours.

    Ours come from result files. A missing number is listed with the command that makes it.

    Example: ripple reproduce table2 figure-speed
    """
    from ripple_lab.reproduce import commands

    if show or not names:
        commands.list_all(console)
    else:
        commands.reproduce(names, output, console, results)


@app.command()
def models(
    throughput: Annotated[
        int | None, typer.Option(min=1, help="Also measure images/s, with this batch size.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the throughput.")] = "cpu",
    only: Annotated[str, typer.Option(help="Only models with this in their name.")] = "",
) -> None:
    """List the models, with their size beside the paper's.

    Multiply-adds of detectors are for a picture of 800×1066 pixels. Detectors have no throughput
    here: `ripple bench detection` times them.

    Example: ripple models --only patch2_32
    """
    from ripple_attention.models import MODELS
    from ripple_lab.bench.cost import model_cost
    from ripple_lab.bench.detection import detector_cost
    from ripple_lab.detection.model import DETECTORS
    from ripple_lab.paper import DETECTORS as PAPERS_DETECTORS
    from ripple_lab.paper import PARAMETERS

    known = [*MODELS, *DETECTORS]
    names = [name for name in known if only in name]
    if not names:
        hint = did_you_mean(only, known, words=True)
        raise typer.BadParameter(
            f"no model's name contains {only!r}: {hint}They are {', '.join(known)}"
        )
    if throughput:
        check_device(device)
    table = Table()
    table.add_column("model", no_wrap=True)
    any_detector = any(name in DETECTORS for name in names)  # the paper gives no others' work
    headings = ["M params", "paper's", "GMACs", *(["paper's"] if any_detector else [])]
    for heading in (*headings, *(["images/s"] if throughput else [])):
        table.add_column(heading, justify="right")
    with console.status("measuring") as status:
        for name in names:
            status.update(name)
            detects = name in DETECTORS
            cost = detector_cost(name) if detects else model_cost(name, throughput, device)
            claims = PARAMETERS.get(name, {})
            size = ", ".join(f"{value:.2f} ({t})" for t, value in claims.items()) or "–"
            work = "–"
            if name in PAPERS_DETECTORS:
                size = f"{PAPERS_DETECTORS[name]['parameters']:.1f} (table 3)"
                work = f"{PAPERS_DETECTORS[name]['gflops']:.0f} (table 3)"
            row = [name, f"{cost.parameters / 1e6:.2f}", size, f"{cost.gflops:.2f}"]
            row += [work] if any_detector else []
            if throughput:
                row.append(f"{cost.images_per_second:,.0f}" if cost.images_per_second else "–")
            table.add_row(*row)
    console.print(table)


def main() -> None:
    """Runs the command; a missing extra or a refused input is one line, not a traceback."""
    warnings.showwarning = show_warning
    try:
        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        extra = "app" if sys.argv[1:2] == ["app"] else EXTRAS.get(package, "demo")
        message = (
            f"This command needs {package}, which is not installed. In the checkout:\n"
            f"    pip install '.[{extra}]'"
        )
        errors.print(message, style="red", soft_wrap=True)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename:
            message = f"{error.filename} cannot be read or written: {error.strerror}"
        if message.startswith("Caught ") and "worker process" in message:
            message = message.strip().rsplit("Error: ", 1)[-1]  # not the worker's whole traceback
        errors.print(message, style="red", soft_wrap=True)
        sys.exit(1)
