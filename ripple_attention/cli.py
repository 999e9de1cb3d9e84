"""The command `ripple`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ripple_attention.train import commands

if TYPE_CHECKING:
    from ripple_attention.bench.op import Row

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Ripple attention: local where it pays, global everywhere.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory, side by side.")
app.add_typer(bench, name="bench")
app.command(context_settings={**commands.EXTRA, "help_option_names": []})(commands.train)
app.command(context_settings=commands.EXTRA)(commands.evaluate)
app.command()(commands.predict)
app.command()(commands.results)
console = Console()
errors = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        from ripple_attention import __version__

        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def ripple(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Ripple attention: local where it pays, global everywhere."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder of the run and the picture.")] = Path(
        "runs/demo"
    ),
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the digits.")] = None,
) -> None:
    """Train a small ripple classifier on digits and draw its ripples. Example: ripple demo"""
    from ripple_attention.demo import run

    run(output, epochs, console)


@app.command()
def picture(
    path: Annotated[Path, typer.Argument(help="The picture to write, .png or .svg.")],
) -> None:
    """Draw what ripple attention is. Example: ripple picture ripples.png"""
    from ripple_attention.plots import draw_explanation

    draw_explanation(path)
    console.print(f"Wrote [bold]{path}[/bold]")


@app.command()
def models(
    throughput: Annotated[
        int | None, typer.Option(min=1, help="Also measure images/s, with this batch size.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the throughput.")] = "cpu",
    only: Annotated[str, typer.Option(help="Names that contain this.")] = "",
) -> None:
    """List the models, their size beside the paper's. Example: ripple models --only patch2_32

    Detectors: multiply-adds of a picture of 800×1066 pixels, no throughput (see ripple bench).
    """
    from ripple_attention.bench.detection import detector_cost
    from ripple_attention.bench.models import model_cost
    from ripple_attention.detection.model import DETECTORS
    from ripple_attention.models import MODELS
    from ripple_attention.paper import DETECTORS as PAPERS_DETECTORS
    from ripple_attention.paper import PARAMETERS

    known = [*MODELS, *DETECTORS]
    names = [name for name in known if only in name]
    if not names:
        raise typer.BadParameter(f"no model's name contains {only!r}; they are {', '.join(known)}")
    table = Table()
    table.add_column("model", no_wrap=True)
    headings = ("M params", "paper's", "GMACs", "paper's")
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
            row = [name, f"{cost.parameters / 1e6:.2f}", size, f"{cost.gflops:.2f}", work]
            if throughput:
                row.append(f"{cost.images_per_second:,.0f}" if cost.images_per_second else "–")
            table.add_row(*row)
    console.print(table)


@bench.command()
def op(
    sides: Annotated[str, typer.Option(help="Grid sides, with commas.")] = "14,32,64,128",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    head_dim: Annotated[int, typer.Option(min=1)] = 32,
    max_distance: Annotated[int, typer.Option(min=1, help="R_max.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each time.")] = 7,
    output: Annotated[
        Path | None, typer.Option(help="CSV; under benchmarks/results unless given.")
    ] = None,
) -> None:
    """Time and peak memory of the operator against the number of tokens.

    Example: ripple bench op --sides 14,64 --rounds 3
    """
    from ripple_attention.bench.op import AGREEMENT, OpBenchmark, default_path, run
    from ripple_attention.files import write_csv

    known = [str(name).removeprefix("torch.") for name in AGREEMENT]
    if dtype not in known:
        raise typer.BadParameter(f"must be one of {', '.join(known)}; got {dtype!r}")
    config = OpBenchmark(
        grid_sides(sides), batch, heads, head_dim, max_distance, dtype, device, rounds
    )
    path = output or default_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)  # what cannot be written is found out first
    rows = []
    with console.status("starting") as status:
        for row in run(config, status.update):
            rows.append(row)
            write_csv(rows, path)  # what was measured stays, whatever happens next
    show(rows)
    console.print(f"Wrote [bold]{path}[/bold]")


@bench.command()
def model(
    sides: Annotated[str, typer.Option(help="Grid sides, with commas.")] = "14,16,64,128",
    tokens_at_once: Annotated[
        int, typer.Option(min=1, help="Tokens of a batch; decides how many images it has.")
    ] = 100_352,
    only: Annotated[
        str, typer.Option(help="Systems whose names contain this, or one of these, with commas.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each time.")] = 5,
    output: Annotated[
        Path | None, typer.Option(help="CSV; under benchmarks/results unless given.")
    ] = None,
) -> None:
    """Images a second of whole models, side by side.

    Example: ripple bench model --sides 14 --device cpu --tokens-at-once 392 --dtype float32
    """
    from ripple_attention.bench.model import SYSTEMS, ModelBenchmark, default_path, run
    from ripple_attention.files import write_csv

    systems = tuple(name for name in SYSTEMS if any(part in name for part in only.split(",")))
    if not systems:
        raise typer.BadParameter(f"no system's name contains {only!r}: {', '.join(SYSTEMS)}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"must be float32, bfloat16 or float16; got {dtype!r}")
    config = ModelBenchmark(
        grid_sides(sides), tokens_at_once, systems, dtype, device, compiled, rounds
    )
    path = output or default_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with console.status("starting") as status:
        for row in run(config, status.update):
            rows.append(row)
            write_csv(rows, path)  # what was measured stays, whatever happens next
    table = Table(title=f"{rows[0]['hardware']}, {dtype}, images/s", title_justify="left")
    for heading in ("tokens", "batch", "system", "pass", "images/s", "MB"):
        table.add_column(heading, justify="left" if heading in ("system", "pass") else "right")
    for row in rows:
        speed = f"{row['images_per_second']:,.1f}" if row["status"] == "ok" else row["status"]
        memory = f"{row['peak_mb']:,.0f}" if row["status"] == "ok" else "–"
        table.add_row(
            f"{row['tokens']:,}", str(row["batch"]), row["system"], row["pass"], speed, memory
        )
    console.print(table)
    console.print(f"Wrote [bold]{path}[/bold]")


@bench.command()
def detection(
    grids: Annotated[
        str, typer.Option(help="Cells of the encoder's grids, rows×columns, with commas; or none.")
    ] = "25x34,50x68,100x136,200x272",
    image: Annotated[
        str, typer.Option(help="Pixels of the whole detectors' picture, height×width; or none.")
    ] = "800x1066",
    backbone: Annotated[str, typer.Option(help="resnet50 or resnet18.")] = "resnet50",
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    padded: Annotated[bool, typer.Option(help="A quarter of each grid is padding.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    compiled: Annotated[bool, typer.Option(help="Use torch.compile for the encoders.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each time.")] = 5,
    output: Annotated[
        Path | None, typer.Option(help="CSV; under benchmarks/results unless given.")
    ] = None,
) -> None:
    """Time and peak memory of detection: the encoder alone, then whole detectors.

    Example: ripple bench detection --grids 25x34,50x68 --device cpu --dtype float32 --image none
    """
    from ripple_attention.bench.detection import DetectionBenchmark, default_path, run
    from ripple_attention.detection.backbone import WEIGHTS
    from ripple_attention.files import write_csv

    if backbone not in WEIGHTS:
        raise typer.BadParameter(f"must be one of {', '.join(WEIGHTS)}; got {backbone!r}")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise typer.BadParameter(f"must be float32, bfloat16 or float16; got {dtype!r}")
    images = rectangles(image)
    if len(images) > 1:
        raise typer.BadParameter(f"detectors are timed on one size of picture; got {image!r}")
    config = DetectionBenchmark(
        grids=rectangles(grids),
        image_size=images[0] if images else None,
        backbone=backbone,
        batch=batch,
        padded=padded,
        dtype=dtype,
        device=device,
        compile=compiled,
        rounds=rounds,
    )
    if not config.grids and config.image_size is None:
        raise typer.BadParameter("there is nothing to time: give --grids or --image")
    path = output or default_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with console.status("starting") as status:
        for row in run(config, status.update):
            rows.append(row)
            write_csv(rows, path)  # what was measured stays, whatever happens next
    table = Table(title=f"{rows[0]['hardware']}, {dtype}, batch {batch}", title_justify="left")
    for heading in ("part", "size", "pass", "system", "ms", "MB"):
        table.add_column(heading, justify="right" if heading in ("size", "ms", "MB") else "left")
    for row in rows:
        size = f"{row['height']}×{row['width']}"
        time = f"{row['median_ms']:,.2f}" if row["status"] == "ok" else row["status"]
        memory = f"{row['peak_mb']:,.0f}" if row["status"] == "ok" else "–"
        table.add_row(row["part"], size, row["pass"], row["system"], time, memory)
    console.print(table)
    console.print(f"Wrote [bold]{path}[/bold]")


@bench.command()
def markdown(
    results: Annotated[Path, typer.Argument(help="A CSV of `ripple bench op`.", exists=True)],
) -> None:
    """Print a CSV of `ripple bench op` in Markdown. Example: ripple bench markdown op.csv"""
    from ripple_attention.bench.op import markdown_table, read_csv

    typer.echo(markdown_table(read_csv(results)))


@bench.command()
def plot(
    results: Annotated[Path, typer.Argument(help="A CSV of `ripple bench op`.", exists=True)],
    path: Annotated[Path, typer.Argument(help="The picture to write, .png or .svg.")],
) -> None:
    """Draw a CSV of `ripple bench op`. Example: ripple bench plot results.csv curves.png"""
    from ripple_attention.plots import draw_benchmark

    draw_benchmark(results, path)
    console.print(f"Wrote [bold]{path}[/bold]")


def grid_sides(text: str) -> tuple[int, ...]:
    """Sides of grids, as a person types them: "14,32"."""
    if not all(side.isdecimal() and int(side) for side in text.split(",")):
        raise typer.BadParameter(f"sides are whole numbers ≥ 1 with commas; got {text!r}")
    return tuple(int(side) for side in text.split(","))


def rectangles(text: str) -> tuple[tuple[int, int], ...]:
    """Heights and widths, as a person types them: "25x34,50x68", or "none"."""
    if text in ("", "none"):
        return ()
    sizes = [size.replace("×", "x").split("x") for size in text.split(",")]
    if not all(len(size) == 2 and all(n.isdecimal() and int(n) for n in size) for size in sizes):
        raise typer.BadParameter(
            f'sizes are height×width, whole numbers ≥ 1, with commas, as "25x34,50x68"; '
            f"got {text!r}"
        )
    return tuple((int(height), int(width)) for height, width in sizes)


def show(rows: "list[Row]") -> None:
    """The rows as tables, one for each size, with times relative to tiles."""
    from ripple_attention.bench.op import short

    first = rows[0]
    console.print(
        f"{first['hardware']}, {first['dtype']}, batch {first['batch']}, {first['heads']} heads of "
        f"{first['head_dim']}, R_max {first['max_distance']}.\n"
        "Medians; ×: how many times as long as tiles take; MB: peak memory; –: does not fit."
    )
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        table = Table(title=f"{tokens:,} tokens", title_justify="left")
        table.add_column("system", no_wrap=True)
        cells: dict[str, list[str]] = {}
        for step in dict.fromkeys(row["pass"] for row in rows):
            name = {"forward": "fwd", "forward+backward": "fwd+bwd"}[step]
            for heading in (f"{name} ms", "×", "MB"):
                table.add_column(heading, justify="right", no_wrap=True)
            here = [row for row in rows if row["tokens"] == tokens and row["pass"] == step]
            fastest = ("ripple tiled triton", "ripple tiled")
            tiled = next(r["median_ms"] for s in fastest for r in here if r["system"] == s)
            for row in here:
                line = cells.setdefault(row["system"], [])
                if row["status"] == "ok":
                    line += [short(row["median_ms"]), short(row["median_ms"] / tiled)]
                    line += [short(row["peak_mb"])]
                else:
                    line += ["–", "–", "–"]
        for system, line in cells.items():
            table.add_row(system, *line)
        console.print(table)


def main() -> None:
    """Runs the command; a missing extra or a refused input is one line, not a traceback."""
    try:
        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        remedy = (
            f"This command needs {package}, which is not installed. Install it with\n"
            "    pip install 'ripple-attention[vision,demo]'"
        )
        own = str(error)
        errors.print(own if "pip install" in own else remedy, style="red", markup=False)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error)
        if message.startswith("Caught ") and "worker process" in message:
            message = message.strip().rsplit("Error: ", 1)[-1]  # not the worker's whole traceback
        errors.print(message, style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        errors.print("Stopped.", style="yellow")
        sys.exit(130)
