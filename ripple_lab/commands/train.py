"""The commands that train and use models: `ripple train`, `evaluate`, `predict` and so on."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ripple_lab.commands.options import CHECKPOINT, DEVICE, EMA
from ripple_lab.console import check_device, console, errors

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from ripple_lab.train.recipe import Recipe

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A recipe's name, or the path of a recipe.json.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two steps on synthetic images: does it start?")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last good checkpoint, if there is one.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/NAME.")
    ] = None,
    show_help: Annotated[
        bool, typer.Option("--help", help="Show this help; after NAME, every field of the recipe.")
    ] = False,
) -> None:
    """Train a recipe; any of its fields may follow.

    Example: ripple train cifar100-ripple-tiny --optimizer.lr 1e-3 --hardware.compile
    """
    if show_list:
        list_recipes()
        return
    if name is None:
        typer.echo(context.get_help())
        raise typer.Exit(0 if show_help else 2)
    recipe = recipe_of(name).smoke_run() if quick else recipe_of(name)
    words = [*context.args, *(["--help"] if show_help else [])]
    recipe = override(recipe, words, f"ripple train {name}")

    from ripple_lab.train.run import train as run

    folder = output or Path("runs") / (f"quick-{recipe.name}" if quick else recipe.name)
    with one_line_when_stopped("The same command with --resume goes on."):
        run(recipe, folder, console, resume)


@contextmanager
def one_line_when_stopped(remedy: str) -> Iterator[None]:
    """A run that stops early says so, how to go on, and exits as its signal demands."""
    from ripple_lab.train.preemption import StoppedError
    from ripple_lab.train.run import is_main_process

    try:
        yield
    except StoppedError as stopped:
        if is_main_process():
            message = f"{stopped} {remedy}"
            errors.print(message, style="yellow", highlight=False, soft_wrap=True)
        known = signal.Signals.__members__.values()
        raise typer.Exit(
            128 + stopped.signal_number if stopped.signal_number in known else 0
        ) from None


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path, CHECKPOINT],
    ema: Annotated[bool, EMA] = False,
) -> None:
    """Measure a trained model on its recipe's test images.

    Accuracy, or average precision of detectors; fields of the recipe may follow.

    Example: ripple evaluate runs/demo --batch-size 64
    """
    from ripple_lab.train.checkpoint import find_weights, read_description

    path = find_weights(checkpoint, ema)  # before the slow imports: the path may be misspelt
    recipe, _ = read_description(path)
    # On one device unless told: on several, each would count its own share.
    one = replace(recipe, hardware=replace(recipe.hardware, devices=1, nodes=1))
    recipe = override(one, context.args, f"ripple evaluate {checkpoint}")

    from ripple_lab.train.evaluate import evaluate as run
    from ripple_lab.train.run import is_main_process

    result = run(path, recipe, console)
    if not is_main_process():
        return
    table = Table(title=f"{recipe.name}: {path}", title_justify="left")
    for heading in ("images", *result.shown):
        table.add_column(heading, justify="right")
    table.add_row(f"{result.images:,}", *result.shown.values())
    console.print(table)
    if result.damaged:
        console.print(f"{result.damaged} images could not be decoded and are not counted.")


def predict(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[CHECKPOINT] PICTURE...",
            help="A .safetensors file, or the folder of a checkpoint or a run. Default: "
            "`embedded`, a classifier of CIFAR-100 that comes with the package. Then the pictures.",
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many classes to name.")] = 5,
    threshold: Annotated[
        float,
        typer.Option(min=0, max=1, help="For detectors: leave out objects below this score."),
    ] = 0.5,
    output: Annotated[
        Path, typer.Option(help="For detectors: folder for the pictures with their boxes.")
    ] = Path("predictions"),
    ema: Annotated[bool, EMA] = False,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Name the classes of pictures, or find the objects in them.

    Example: ripple predict runs/demo seven.png --top 3
    """
    check_device(device)
    checkpoint, images = checkpoint_and_pictures(paths)
    if missing := [path for path in images if not path.exists()]:  # before anything slow
        raise ValueError("\n".join(f"{path} does not exist" for path in missing))
    from ripple_lab.data.pictures import open_image
    from ripple_lab.train.checkpoint import find_weights, read_description

    weights = find_weights(checkpoint, ema)  # before the slow imports: the path may be misspelt
    recipe, classes = read_description(weights)

    from ripple_lab.train.evaluate import ObjectFinder, Predictor

    detects = recipe.task == "detection"
    finder = ObjectFinder(weights, device) if detects else None
    predictor = None if detects else Predictor(weights, device)
    broken: list[str] = []
    written: set[Path] = set()
    for path in images:
        try:
            image = open_image(path)
        except ValueError as error:
            broken.append(str(error))
            continue
        console.print(str(path), highlight=False, soft_wrap=True)
        table = Table(show_header=detects)
        if predictor:
            for label, probability in predictor(image)[:top]:
                table.add_row(label, f"{probability:.1%}")
        if finder:
            found = finder(image)
            fill_objects(table, found, classes, threshold)
            table.caption = str(draw(image, found, classes, threshold, output, path.stem, written))
        console.print(table)
    if broken:
        raise ValueError("\n".join(broken))


def fill_objects(
    table: Table, found: "dict[str, Tensor]", classes: tuple[str, ...], threshold: float
) -> None:
    """A row for each object: its class, score and box in pixels."""
    for heading in ("object", "score", "left", "top", "right", "bottom"):
        table.add_column(heading, justify="left" if heading == "object" else "right")
    rows = zip(*(found[name].tolist() for name in ("labels", "scores", "boxes")), strict=True)
    for label, score, box in rows:
        if score >= threshold:
            table.add_row(classes[label], f"{score:.2f}", *(f"{edge:.0f}" for edge in box))


def draw(
    image: "Image",
    found: "dict[str, Tensor]",
    classes: tuple[str, ...],
    threshold: float,
    folder: Path,
    name: str,
    written: set[Path],
) -> Path:
    """Writes a picture with its boxes, under a name that no other of this command has."""
    from ripple_lab.detection.drawing import draw_objects
    from ripple_lab.files import replacing

    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{name}.png", 1
    while path in written:
        number += 1
        path = folder / f"{name}-{number}.png"
    written.add(path)
    with replacing(path) as partial:
        draw_objects(image, found, classes, threshold).save(partial, "PNG")
    return path


def results(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    output: Annotated[Path, typer.Option(help="The CSV to write.")],
) -> None:
    """Gather the results of runs into a CSV.

    Example: ripple results runs/* --output results.csv
    """
    from ripple_lab.files import write_csv
    from ripple_lab.gather import gather

    rows = gather(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_csv(rows, output)
    console.print(f"Wrote {output}, runs: {len(rows)}")


def pack(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.")],
    path: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    ema: Annotated[bool, EMA] = False,
) -> None:
    """Write a model to pass on: half precision, with a model card.

    Example: ripple pack runs/demo digits.safetensors
    """
    from ripple_lab.pack import pack as run_pack

    card = run_pack(run, path, ema)
    console.print(f"Wrote {path} and {card}", soft_wrap=True)


def checkpoint_and_pictures(paths: list[Path]) -> tuple[Path, list[Path]]:
    """The first path, if it is a folder or weights or has no ending; else the embedded weights."""
    first, *others = paths
    if not first.is_dir() and first.suffix not in ("", ".safetensors"):
        return Path("embedded"), paths
    if not others:
        raise typer.BadParameter(f"a picture must follow the checkpoint; got {first} alone")
    return first, others


def recipe_of(name: str) -> "Recipe":
    """A recipe by its name or its file."""
    from ripple_lab.recipes import find_recipe
    from ripple_lab.train.recipe import Recipe

    if name.startswith("-"):
        raise typer.BadParameter(f"the recipe's name comes before its fields; got {name!r} first")
    if name.endswith(".json"):
        if not Path(name).is_file():
            raise ValueError(
                f"a name that ends in .json is the file of a recipe; there is no {name}: "
                "`ripple train --list` shows recipes by name"
            )
        return Recipe.read(Path(name))
    return find_recipe(name)


def override(recipe: "Recipe", words: list[str], command: str) -> "Recipe":
    """The recipe with the fields that were given on the command line, their types checked."""
    if console.no_color or not errors.is_terminal:  # which tyro itself does not look at
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    import tyro

    about = f"Everything that decides the result of a run. Example: {command} --seed 1."
    if command.startswith("ripple train"):
        about += (
            " Beside these fields: --quick, --resume, --output FOLDER (see ripple train --help)."
        )
    return tyro.cli(type(recipe), default=recipe, args=words, prog=command, description=about)


def list_recipes() -> None:
    """Prints every recipe: what it shows, the paper's result and ours, where there are any."""
    from ripple_lab.paper import ACCURACY, AVERAGE_PRECISION, TOP1_OF_TABLE_8
    from ripple_lab.recipes import all_recipes
    from ripple_lab.reproduce.queries import own_result

    table = Table(box=None)
    table.add_column("recipe", no_wrap=True)
    table.add_column("epochs", justify="right", no_wrap=True)
    table.add_column("paper", justify="right", no_wrap=True)
    table.add_column("ours, %", justify="right", no_wrap=True)
    table.add_column("shows")
    top1 = TOP1_OF_TABLE_8 | {recipe: numbers[0] for recipe, numbers in ACCURACY.items()}
    for name, listed in all_recipes().items():
        paper = f"{top1[name]:.1f}" if name in top1 else "–"
        if name in AVERAGE_PRECISION:
            paper = f"AP {AVERAGE_PRECISION[name][0]:.1f}"
        row = (name, str(listed.recipe.epochs), paper, own_result(name), listed.shows)
        table.add_row(*row)
    console.print(table)
    console.print("* with an option that is not the recipe's; `ripple reproduce all` says which")
