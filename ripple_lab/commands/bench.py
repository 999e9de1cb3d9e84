"""The commands `ripple bench …`: four measure, two show what was measured."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.table import Table

from ripple_lab.console import check_device, console, did_you_mean
from ripple_lab.text import plain

if TYPE_CHECKING:
    from ripple_lab.bench.attentions import Shape

Row = dict[str, Any]
Dtype = Literal["float32", "bfloat16", "float16"]

DEVICE = typer.Option(help="cpu or cuda. Default: cuda, if there is a GPU.")
DTYPE = typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU.")
ONLY = typer.Option(help="Systems with this in their name; several parts of names with commas.")
ROUNDS = typer.Option(min=1, help="How often each time is measured.")
OUTPUT = typer.Option(
    help="The CSV to write. Default: in benchmarks/results if there is one, else here."
)

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory, side by side.\n\nExample: ripple bench op --sides 14,32",
)


@bench.command()
def op(
    sides: Annotated[str, typer.Option(help="Grid sides, with commas.")] = "14,32,64,128",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    head_dim: Annotated[int, typer.Option(min=1)] = 32,
    max_distance: Annotated[int, typer.Option(min=1, help="R_max.")] = 4,
    partition: Annotated[
        Literal["chebyshev", "logarithmic", "foveal"], typer.Option(help="Kind of rings.")
    ] = "chebyshev",
    dtype: Annotated[Literal["float64", "float32", "bfloat16", "float16"] | None, DTYPE] = None,
    device: Annotated[str, DEVICE] = "",
    rounds: Annotated[int, ROUNDS] = 7,
    only: Annotated[str, ONLY] = "",
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Time and peak memory of the operator, by tokens.

    Example: ripple bench op --sides 14,64 --rounds 3
    """
    from ripple_lab.bench.op import OpBenchmark, default_path, run, systems

    device = check_device(device)
    config = OpBenchmark(
        whole_numbers(sides, "sides"), batch, heads, head_dim, max_distance,
        dtype or usual_dtype(device), device, rounds, partition=partition,
    )  # fmt: skip
    names = systems(config.groups, config)
    config = replace(config, only=systems_named(only, names))
    path = output or default_path(config)
    rows = measure_to(path, lambda progress: run(config, progress))
    show(rows)
    console.print(f"Wrote {path}")


@bench.command()
def layer(
    shapes: Annotated[
        str,
        typer.Option(
            help='Tokens (or height x width), batch and channels/heads, as "196,64,192/6; '
            '50x68,1,256/8"; some usual ones unless given, small on a CPU.'
        ),
    ] = "",
    reaches: Annotated[str, typer.Option(help="R_max of ripples, with commas.")] = "4,8",
    maps: Annotated[
        str, typer.Option(help="Feature maps of ripples, with commas.")
    ] = "learned,elu,relu,t2r,hedgehog",
    weights: Annotated[
        str, typer.Option(help="Kinds of spatial weights, with commas.")
    ] = "stick-breaking,fixed,softmax,truncated",
    only: Annotated[str, ONLY] = "",
    rounds: Annotated[int, ROUNDS] = 2,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Start nothing more after this many seconds.")
    ] = None,
    device: Annotated[str, DEVICE] = "",
    dtype: Annotated[Dtype | None, DTYPE] = None,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Time and peak memory of layers with their projections.

    Ripples are the first reach, map and kind of weights, and the others one at a time.

    Example: ripple bench layer --shapes "196,8,192/6; 4096,1,384/6" --reaches 4 --budget 100
    """
    from ripple_attention.spatial_weights import WeightKind
    from ripple_lab.bench.attentions import WEIGHTS
    from ripple_lab.bench.layer import SHAPES, LayerBenchmark, default_path, run

    device = check_device(device)
    kinds = cast("tuple[WeightKind, ...]", tuple(weights.split(",")))
    if unknown := [kind for kind in kinds if kind not in WEIGHTS]:
        raise typer.BadParameter(
            f"weights must be of {', '.join(WEIGHTS)}, with commas; got {', '.join(unknown)!r}"
        )
    config = LayerBenchmark(
        shapes=layer_shapes(shapes or SHAPES[device.partition(":")[0]]),
        reaches=whole_numbers(reaches, "reaches"),
        maps=tuple(maps.split(",")),
        weights=kinds,
        dtype=dtype or usual_dtype(device),
        device=device,
        rounds=rounds,
        budget=math.inf if budget is None else budget,
    )
    config = replace(config, only=systems_named(only, config.systems))
    path = output or default_path(config)
    rows = measure_to(path, lambda progress: run(config, progress))
    show_layers(rows)
    console.print(f"Wrote {path}")
    if any(row["status"].startswith(("wrong", "failed")) for row in rows):
        raise typer.Exit(1)


@bench.command()
def model(
    sides: Annotated[
        str, typer.Option(help="Grid sides, with commas. Default: 14,16,64,128; 14 on a CPU.")
    ] = "",
    tokens_at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a batch: as many images as have these. Default: 100,352; 392 on a CPU.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images of a batch, in place of --tokens-at-once.")
    ] = None,
    width: Annotated[
        int, typer.Option(min=1, help="Channels of a token; 6 heads share them.")
    ] = 192,
    only: Annotated[
        str,
        typer.Option(
            help="Systems with this in their name; several parts of names with commas. Default: "
            "all but the slowest two."
        ),
    ] = "",
    dtype: Annotated[Dtype | None, DTYPE] = None,
    device: Annotated[str, DEVICE] = "",
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    forward_alone: Annotated[
        bool, typer.Option("--forward-alone", help="No training steps.")
    ] = False,
    rounds: Annotated[int, ROUNDS] = 5,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Images a second of whole models, side by side.

    Example: ripple bench model --sides 14 --only DeiT,R_max
    """
    from ripple_lab.bench.model import (
        PASSES,
        SYSTEMS,
        USUAL,
        ModelBenchmark,
        default_path,
        run,
    )

    systems = systems_named(only, SYSTEMS) if only else USUAL
    device = check_device(device)
    on_cpu = device == "cpu"
    if width % 6:
        raise typer.BadParameter(f"the width must be a multiple of the 6 heads; got {width}")
    config = ModelBenchmark(
        sides=whole_numbers(sides or ("14" if on_cpu else "14,16,64,128"), "sides"),
        tokens_at_once=tokens_at_once or (392 if on_cpu else 100_352),
        systems=systems,
        dtype=dtype or usual_dtype(device),
        device=device,
        compile=compiled,
        rounds=rounds,
        batch=batch,
        width=width,
        passes=PASSES[:1] if forward_alone else PASSES,
    )
    path = output or default_path(config)
    rows = measure_to(path, lambda progress: run(config, progress))
    table = Table(title=f"{rows[0]['hardware']}, {config.dtype}, images/s", title_justify="left")
    for heading in ("tokens", "batch", "system", "pass", "images/s", "MB"):
        table.add_column(heading, justify="left" if heading in ("system", "pass") else "right")
    for row in rows:
        timed = row["status"] == "ok"
        speed = f"{row['images_per_second']:,.1f}" if timed else row["status"]
        memory = f"{row['peak_mb']:,.0f}" if timed else "–"
        tokens, images = f"{row['tokens']:,}", str(row["batch"])
        table.add_row(tokens, images, row["system"], row["pass"], speed, memory)
    console.print(table)
    console.print(f"Wrote {path}")


@bench.command()
def detection(
    grids: Annotated[
        str, typer.Option(help="Cells of the encoder's grids, rows×columns, with commas; or none.")
    ] = "25x34,50x68,100x136,200x272",
    image: Annotated[
        str, typer.Option(help="Pixels of the whole detectors' picture, height×width; or none.")
    ] = "800x1066",
    backbone: Annotated[Literal["resnet50", "resnet18"], typer.Option()] = "resnet50",
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 1,
    padded: Annotated[bool, typer.Option(help="A quarter of each grid is padding.")] = False,
    dtype: Annotated[Dtype | None, DTYPE] = None,
    device: Annotated[str, DEVICE] = "",
    compiled: Annotated[bool, typer.Option(help="Use torch.compile for the encoders.")] = False,
    rounds: Annotated[int, ROUNDS] = 5,
    output: Annotated[Path | None, OUTPUT] = None,
) -> None:
    """Time and peak memory of encoders and whole detectors.

    Example: ripple bench detection --grids 25x34,50x68 --device cpu --dtype float32 --image none
    """
    from ripple_lab.bench.detection import DetectionBenchmark, default_path, run

    device = check_device(device)
    images = rectangles(image)
    if len(images) > 1:
        raise typer.BadParameter(f"detectors are timed on one size of picture; got {image!r}")
    config = DetectionBenchmark(
        grids=rectangles(grids),
        image_size=images[0] if images else None,
        backbone=backbone,
        batch=batch,
        padded=padded,
        dtype=dtype or usual_dtype(device),
        device=device,
        compile=compiled,
        rounds=rounds,
    )
    if not config.grids and config.image_size is None:
        raise typer.BadParameter("there is nothing to time: give --grids or --image")
    path = output or default_path(config)
    rows = measure_to(path, lambda progress: run(config, progress))
    table = Table(
        title=f"{rows[0]['hardware']}, {config.dtype}, batch {batch}", title_justify="left"
    )
    for heading in ("part", "size", "pass", "system", "ms", "MB"):
        table.add_column(heading, justify="right" if heading in ("size", "ms", "MB") else "left")
    for row in rows:
        timed = row["status"] == "ok"
        size = f"{row['height']}×{row['width']}"
        time = f"{row['median_ms']:,.2f}" if timed else row["status"]
        memory = f"{row['peak_mb']:,.0f}" if timed else "–"
        table.add_row(row["part"], size, row["pass"], row["system"], time, memory)
    console.print(table)
    console.print(f"Wrote {path}")


@bench.command()
def markdown(
    results: Annotated[Path, typer.Argument(help="A CSV of `ripple bench op`.", exists=True)],
) -> None:
    """Print a CSV of `ripple bench op` in Markdown.

    Example: ripple bench markdown op.csv
    """
    from ripple_lab.bench.op import markdown_table, read_csv

    typer.echo(plain(markdown_table(read_csv(results)), keep="\n"))


@bench.command()
def plot(
    results: Annotated[
        Path, typer.Argument(help="A CSV of `ripple bench op`, `layer` or `model`.", exists=True)
    ],
    path: Annotated[Path, typer.Argument(help="The picture to write, .png or .svg.")],
) -> None:
    """Draw a CSV of `ripple bench op`, `layer` or `model`.

    Example: ripple bench plot results.csv curves.png
    """
    from ripple_lab.plots import draw_benchmark

    draw_benchmark(results, path)
    console.print(f"Wrote {path}")


def measure_to(path: Path, run: Callable[[Callable[[str], None]], Iterator[Row]]) -> list[Row]:
    """The rows of a measurement. They are written to a CSV as they come, so a stop loses none."""
    from ripple_lab.files import write_csv

    path.parent.mkdir(parents=True, exist_ok=True)  # before any time is spent on measuring
    rows = []
    with console.status("starting") as status:
        for row in run(status.update):
            rows.append(row)
            write_csv(rows, path)
    return rows


def whole_numbers(text: str, what: str) -> tuple[int, ...]:
    """Sides of grids, or reaches, as a person types them: "14,32"."""
    if not all(number.isdecimal() and int(number) for number in text.split(",")):
        raise typer.BadParameter(f"{what} are whole numbers ≥ 1 with commas; got {text!r}")
    return tuple(int(number) for number in text.split(","))


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


def layer_shapes(text: str) -> tuple["Shape", ...]:
    """Shapes of layers, as a person types them: "196,64,192/6; 50x68,1,256/8"."""
    from ripple_lab.bench.attentions import Shape

    shapes = []
    for words in filter(None, (part.strip() for part in text.split(";"))):
        numbers = re.fullmatch(r"(\d+)(?:[x×](\d+))? *, *(\d+) *, *(\d+)/(\d+)", words)
        first, second, *rest = [int(n or 0) for n in numbers.groups()] if numbers else [0] * 5
        side = math.isqrt(first)
        height, width = (first, second) if second else (side, side if side**2 == first else 0)
        if not all((height, width, *rest)) or rest[1] % rest[2]:
            raise typer.BadParameter(
                "a shape is tokens,batch,channels/heads, as 196,64,192/6: tokens a square number "
                "(or height x width), channels a multiple of heads, semicolons between shapes; "
                f"got {words!r}"
            )
        shapes.append(Shape(height, width, *rest))
    if not shapes:
        raise typer.BadParameter(f"there is no shape in {text!r}")
    return tuple(shapes)


def systems_named(only: str, known: Iterable[str]) -> tuple[str, ...]:
    """The systems that have one of these words in their names; without any, lists all."""
    from ripple_lab.bench.measure import matching_names

    names = {name.lower(): name for name in known}
    found = matching_names(only.lower(), names)
    if not found:
        raise typer.BadParameter(
            f"no system's name contains {only!r}: "
            f"{did_you_mean(only, names.values(), words=True)}They are {'; '.join(names.values())}"
        )
    return tuple(names[name] for name in found)


def usual_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def show(rows: list[Row]) -> None:
    """The rows as tables, one for each size, with times relative to tiles."""
    from ripple_lab.bench.op import short

    first = rows[0]
    console.print(
        f"{first['hardware']}, {first['dtype']}, batch {first['batch']}, {first['heads']} heads of "
        f"{first['head_dim']}, R_max {first['max_distance']}.\n"
        "Medians; ×: how many times as long as tiles, if timed; MB: peak memory; –: does not fit."
    )
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        table = Table(title=f"{tokens:,} tokens", title_justify="left")
        table.add_column("system")
        cells: dict[str, list[str]] = {}
        for step in dict.fromkeys(row["pass"] for row in rows):
            name = {"forward": "fwd", "forward+backward": "fwd+bwd"}[step]
            for heading in (f"{name} ms", "×", "MB"):
                table.add_column(heading, justify="right", no_wrap=True)
            here = [row for row in rows if row["tokens"] == tokens and row["pass"] == step]
            fastest = ("ripple tiled triton", "ripple tiled")
            times = [r["median_ms"] for s in fastest for r in here if r["system"] == s]
            for row in here:
                line = cells.setdefault(row["system"], [])
                if row["status"] == "ok":
                    ratio = short(row["median_ms"] / times[0]) if times else "–"
                    line += [short(row["median_ms"]), ratio]
                    line += [short(row["peak_mb"])]
                else:
                    line += ["–", "–", "–"]
        for system, line in cells.items():
            table.add_row(system, *line)
        console.print(table)


def show_layers(rows: list[Row]) -> None:
    """Systems by shapes, as many shapes in a table as fit; then why a system has no time."""
    from ripple_lab.bench.layer import table_cells

    console.print(
        f"{rows[0]['hardware']}, {rows[0]['dtype']}. Milliseconds, forward / forward and backward;"
        " ×: how many times as long as softmax."
    )
    cells = table_cells(rows)
    shapes = list(dict.fromkeys(shape for line in cells.values() for shape in line))
    texts = [*shapes, *(text for line in cells.values() for text in line.values())]
    width = 3 + max(len(part) for text in texts for part in text.split("\n"))
    at_once = max(1, (console.width - 4 - max(map(len, cells))) // width)
    for first in range(0, len(shapes), at_once):
        table = Table("system")
        for shape in shapes[first : first + at_once]:
            table.add_column(shape, justify="right", no_wrap=True)
        for system, line in cells.items():
            table.add_row(system, *(line[shape] for shape in shapes[first : first + at_once]))
        console.print(table)
    reasons = {(row["system"], row["status"]): None for row in rows if row["status"] != "ok"}
    for system, status in reasons:
        console.print(f"{system}: {status}")
