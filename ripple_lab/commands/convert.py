"""The commands that turn pretrained models into ripples: `ripple convert` and `ripple align`."""

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ripple_lab.console import check_device, console, errors

if TYPE_CHECKING:
    from ripple_attention.convert import Report
    from ripple_lab.align.models import Pretrained

MODEL = typer.Argument(help="The name of a timm model, or a folder of transformers.")
PHOTOS = typer.Argument(help="A folder of photos, without labels.")
WEIGHTS = typer.Option(
    help="A file with a timm model's weights; unless given, timm downloads its own, once."
)
BLOCKS = typer.Option(help="global, all, or numbers with commas.")
NEAR = typer.Option(help="softmax or features: what weighs tokens nearby.")
MAX_DISTANCE = typer.Option(min=1, help="How far rings reach, in tokens.")
PARTITION = typer.Option(help="chebyshev, logarithmic or foveal rings.")
SIDE = typer.Option(
    min=1, max=8192, help="Pixels of an image's side; the model's own unless given."
)
COUNT = typer.Option(min=2, help="Of how many photos; an eighth of them to measure with.")
BATCH = typer.Option(min=1, help="Photos at a time.")
DEVICE = typer.Option(help="cpu or cuda.")
KEEP = typer.Option("--keep-lessons", help="Keep what softmax gives in memory: few photos.")


def convert(
    name: Annotated[str, MODEL],
    photos: Annotated[Path | None, PHOTOS] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Measure the error of each block on the photos.")
    ] = False,
    weights: Annotated[Path | None, WEIGHTS] = None,
    blocks: Annotated[str, BLOCKS] = "global",
    near: Annotated[str, NEAR] = "softmax",
    max_distance: Annotated[int, MAX_DISTANCE] = 4,
    partition: Annotated[str, PARTITION] = "chebyshev",
    steps: Annotated[int, typer.Option(min=0, help="Of a short alignment before it is told.")] = 30,
    side: Annotated[int | None, SIDE] = None,
    count: Annotated[int, COUNT] = 32,
    batch_size: Annotated[int, BATCH] = 1,
    keep_lessons: Annotated[bool, KEEP] = False,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Show which blocks of a pretrained model can turn into ripples.

    Example: ripple convert vit_small_patch16_dinov3 photos --plan
    """
    check_device(device)
    if plan and photos is None:
        raise typer.BadParameter("--plan measures on photos: name their folder after the model")
    from ripple_attention.convert import convert as run_convert
    from ripple_lab.align.models import Photos, find_photos
    from ripple_lab.align.plan import plan as run_plan

    settings = conversion(blocks, near, max_distance, partition)
    if photos is None or not plan:
        show_report(run_convert(load(name, weights, side).model, **settings))
        return
    found = find_photos(photos, count)  # before a download, which takes long
    pretrained = load(name, weights, side)
    learn, held_out = (Photos(paths, pretrained, batch_size) for paths in found)
    report, forecasts = run_plan(
        pretrained.model.to(device),
        learn,
        held_out,
        steps=steps,
        keep_lessons=keep_lessons,
        console=console,
        **settings,
    )
    show_report(report)
    table = Table(title=f"relative squared error on {len(held_out.paths)} photos")
    for heading in ("block", "at once", f"after {steps} steps", "advice"):
        table.add_column(heading)
    for one in forecasts:
        table.add_row(str(one.index), f"{one.before:.3f}", f"{one.after:.3f}", one.advice)
    console.print(table)


def align(
    name: Annotated[str, MODEL],
    photos: Annotated[Path, PHOTOS],
    output: Annotated[
        Path, typer.Option(help="The .safetensors file; the conversion is written beside it.")
    ],
    weights: Annotated[Path | None, WEIGHTS] = None,
    blocks: Annotated[str, BLOCKS] = "global",
    near: Annotated[str, NEAR] = "softmax",
    max_distance: Annotated[int, MAX_DISTANCE] = 4,
    partition: Annotated[str, PARTITION] = "chebyshev",
    steps: Annotated[int, typer.Option(min=0, help="For new parameters alone.")] = 150,
    block_steps: Annotated[int, typer.Option(min=0, help="For projections, too.")] = 0,
    feature_steps: Annotated[int, typer.Option(min=0, help="Towards features, end to end.")] = 0,
    side: Annotated[int | None, SIDE] = None,
    count: Annotated[int | None, COUNT] = None,
    batch_size: Annotated[int, BATCH] = 1,
    keep_lessons: Annotated[bool, KEEP] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it stopped.")] = False,
    device: Annotated[str, DEVICE] = "cpu",
) -> None:
    """Turn a pretrained model into ripples that learn from its softmax.

    On several GPUs: torchrun --nproc-per-node 8 --no-python ripple align …

    Example: ripple align vit_small_patch16_dinov3 photos --output dinov3-ripples.safetensors
    """
    check_device(device)
    from ripple_attention.convert import convert as run_convert
    from ripple_lab.align import align as run_align
    from ripple_lab.align import errors as block_errors
    from ripple_lab.align.models import Photos, find_photos
    from ripple_lab.align.processes import is_main, one_share, process_group
    from ripple_lab.files import naming_full_disk, replace_text
    from ripple_lab.train.lock import only_process_at
    from ripple_lab.train.weights import write_weights

    if output.suffix != ".safetensors" or output.is_dir():
        raise typer.BadParameter(f"--output is a .safetensors file; got {output}")
    checkpoint, written = output.with_suffix(".align.safetensors"), output.with_suffix(".json")
    with process_group(device) as place, only_process_at(output) if is_main() else nullcontext():
        if not resume and is_main():
            checkpoint.unlink(missing_ok=True)
        paths, held_out_paths = find_photos(photos, count)  # before a download, which takes long
        pretrained = load(name, weights, side)
        teacher = pretrained.model.to(place)
        model = copy.deepcopy(teacher)
        report = run_convert(model, **conversion(blocks, near, max_distance, partition))
        if is_main():
            show_report(report)
        held_out = Photos(held_out_paths, pretrained, batch_size)
        before = block_errors(model, teacher, held_out)
        run_align(
            model,
            teacher,
            Photos(one_share(paths), pretrained, batch_size),
            steps=steps,
            block_steps=block_steps,
            feature_steps=feature_steps,
            keep_lessons=keep_lessons,
            checkpoint=checkpoint,
            console=console,
        )
        after = block_errors(model, teacher, held_out)
        if not is_main():
            return
        conversion_text = json.dumps(report.config, indent=2)
        with naming_full_disk(output):
            write_weights(output, model.state_dict(), {"ripples": conversion_text})
            replace_text(written, conversion_text + "\n")
        checkpoint.unlink(missing_ok=True)
    table = Table(title=f"relative squared error on {len(held_out_paths)} photos")
    for heading in ("block", "before", "after"):
        table.add_column(heading)
    for block, error in after.items():
        table.add_row(block, f"{before[block]:.3f}", f"{error:.3f}")
    console.print(table)
    console.print(f"Wrote {output} and {written}", soft_wrap=True)


def load(name: str, weights: Path | None, side: int | None) -> "Pretrained":
    """A pretrained model; says what may be downloaded, and which weights a file does not have."""
    from ripple_lab.align.models import load_pretrained
    from ripple_lab.align.processes import is_main

    if weights is None and not Path(name).exists() and is_main():
        told = f"The weights of {name} are timm's: from its cache, or downloaded into it."
        console.print(told, highlight=False, soft_wrap=True)
    pretrained = load_pretrained(name, weights, side)
    if missing := pretrained.missing:
        some = ", ".join((*missing[:3], *["…"] * (len(missing) > 3)))
        message = f"{weights} lacks {len(missing)} weights of {name}, which stay random: {some}"
        errors.print(message, style="yellow", soft_wrap=True)
    return pretrained


def conversion(blocks: str, near: str, max_distance: int, partition: str) -> dict[str, Any]:
    """Arguments of `convert`, from those of a command."""
    chosen: str | list[int] = blocks
    if blocks not in ("global", "all"):
        try:
            chosen = [int(number) for number in blocks.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"--blocks is global, all, or numbers with commas; got {blocks!r}"
            ) from None
    return {
        "blocks": chosen,
        "near": near,
        "max_distance": max_distance,
        "partition": partition,
    }


def show_report(report: "Report") -> None:
    console.print(str(report), highlight=False, soft_wrap=True)
