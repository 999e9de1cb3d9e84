"""The commands that look into models: `ripple explain`, `analyze` and `app`."""

import re
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ripple_lab.commands.options import CHECKPOINT, DEVICE, EMA
from ripple_lab.console import check_device, console


def explain(
    checkpoint: Annotated[Path, CHECKPOINT],
    image: Annotated[Path, typer.Argument(help="A picture.")],
    at: Annotated[
        str | None, typer.Option(help="ROW,COL of a patch, from 0. Default: the middle one.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.")] = Path(
        "explanation.png"
    ),
    max_distance: Annotated[
        int | None, typer.Option(min=1, help="A smaller R_max than in training.")
    ] = None,
    halt_threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Another τ, where ripples halt.")
    ] = None,
    ema: Annotated[bool, EMA] = False,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Draw what a patch attends to, in every layer and head.

    Example: ripple explain runs/demo seven.png --at 3,5 --output seven-3-5.svg
    """
    from ripple_lab.data.pictures import open_image
    from ripple_lab.inspection.explain import Explainer
    from ripple_lab.inspection.figure import write_explanation
    from ripple_lab.inspection.views import Settings
    from ripple_lab.plots import check_suffix

    check_suffix(output)
    check_device(device)
    patch = None if at is None else row_and_column(at)
    with console.status("looking at the picture"):
        explainer = Explainer.from_checkpoint(checkpoint, ema=ema, device=device)
        explanation = explainer(open_image(image), Settings(max_distance, halt_threshold))
        H, W = explanation.grid_size
        write_explanation(explanation, patch or (H // 2, W // 2), output)
    name, probability = explanation.classes[0]
    console.print(f"{name}, {probability:.1%}. Wrote {output}", soft_wrap=True)


def analyze(
    checkpoint: Annotated[Path, CHECKPOINT],
    output: Annotated[Path, typer.Option(help="Folder of the figures and CSV files.")] = Path(
        "analysis"
    ),
    images: Annotated[
        Path | None, typer.Option(help="A folder of pictures; the recipe's test images if not.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Over how many images.")] = 64,
    ema: Annotated[bool, EMA] = False,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Write what a model learned about distance.

    Mean ripples, where they halt, their divergence, and what eps leaves of attention, as figures
    and CSV files; for a run that wrote down its ripples (ripples.jsonl), also how they diverged in
    training.

    Example: ripple analyze runs/demo --output analysis
    """
    from ripple_lab.inspection.analyze import (
        pictures_of_folder,
        profile,
        recipe_pictures,
        training_rows,
        write_analysis,
        write_training,
    )
    from ripple_lab.inspection.explain import Explainer
    from ripple_lab.train.checkpoint import find_weights

    check_device(device)
    explainer = Explainer.from_checkpoint(checkpoint, ema=ema, device=device)
    weights = find_weights(checkpoint, ema)
    if images is None:
        pictures = recipe_pictures(weights, explainer.image_size, count)
    else:
        pictures = pictures_of_folder(images, count)
    with console.status(f"looking at {len(pictures)} images"):
        written = write_analysis(profile(explainer, pictures), output)
        rows = training_rows(weights)
        written += write_training(rows, output) if rows else []
    for path in written:
        console.print(f"Wrote {path}", soft_wrap=True)


def app(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint, a run, or a folder of runs. Default: `embedded`, and those in runs."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860 on.")
    ] = None,
    browse: Annotated[bool, typer.Option(help="Open the browser.")] = True,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Click on a picture and see its ripples, in the browser.

    The page is served to this machine alone.

    Example: ripple app runs/demo --port 7861
    """
    from ripple_lab.inspection.app import served
    from ripple_lab.inspection.viewer import Viewer

    check_device(device)
    with console.status("starting"):
        viewer = Viewer(checkpoint, device)
    for name in ("SIGTERM", "SIGHUP"):  # pictures must not stay behind
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    with served(viewer, port, browse=browse) as address:
        console.print(f"Serving {address} to this machine alone; Ctrl-C stops it.")
        while True:
            time.sleep(3600)


def row_and_column(text: str) -> tuple[int, int]:
    """A patch as a person types it.

    >>> row_and_column("3,5")
    (3, 5)
    """
    found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text)
    if found is None:
        raise ValueError(f"a patch is ROW,COL, two whole numbers from 0, as 3,5; got {text!r}")
    return int(found[1]), int(found[2])
