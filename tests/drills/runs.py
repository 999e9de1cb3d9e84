"""A tiny run that drills disturb, and what shows that the disturbance did no harm."""

import json
from contextlib import suppress
from pathlib import Path

from processes import Ripple
from ripple_lab.data.augment import Augmentation
from ripple_lab.train.classification import ClassificationRecipe, DataSpec, ModelSpec
from ripple_lab.train.recipe import Hardware, OptimizerSpec

# 18 steps, and a checkpoint after each of them.
TINY = ClassificationRecipe(
    name="tiny",
    model=ModelSpec("ripple_tiny4_patch2_32", patch_size=8, width=24, heads=2, depth=2),
    data=DataSpec("synthetic", num_classes=10, count=26),
    augmentation=Augmentation(auto_augment=None),
    optimizer=OptimizerSpec(lr=1e-3, warmup_epochs=1),
    epochs=3,
    batch_size=4,
    ema_decay=0.9,
    log_every=2,
    checkpoint_minutes=0.0,
    hardware=Hardware("cpu", precision="32-true"),
)
FINAL = ("model.safetensors", "ema.safetensors", "result.json")


def train(run, *words, recipe=TINY, logs="logs", beside=None):
    """The command `ripple train` on a recipe, in a process that runs; its recipe and logs are in
    the folder beside the run's, or in another one."""
    beside = beside or run.parent
    path = beside / f"{recipe.name}-{recipe.epochs}.json"
    if not path.exists():
        path.write_text(recipe.to_json())
    logs = beside / f"{run.name}-{logs}"
    return Ripple(logs, "train", path, "--output", run, *words, OMP_NUM_THREADS="1")


def reference(folder, recipe=TINY):
    """A run that nothing disturbed."""
    run = folder / "reference"
    process = train(run, recipe=recipe)
    assert process.wait(300) == 0, process.errors.read_text()
    return run


def harm(run, whole):
    """How a run that was gone on with differs from an undisturbed one; "" if it does not."""
    for name in FINAL[:2]:
        if (run / name).read_bytes() != (whole / name).read_bytes():
            return f"{name} differs"
    if result(run) != result(whole):
        return "the result differs"
    left = [path.name for path in run.rglob(".*")]
    return f"left over: {', '.join(left)}" if left else ""


def result(run):
    """What does not depend on the time of day."""
    found = json.loads((run / "result.json").read_text())
    return {k: v for k, v in found.items() if "minutes" not in k and "per_second" not in k}


def gone_on(run, whole, **options):
    """Goes on with a run to its end: what is wrong with it then."""
    process = train(run, "--resume", logs="resumed", **options)
    if process.wait(300) != 0:
        return process.errors.read_text() or "it does not go on"
    return harm(run, whole)


def refusal(process, *words):
    """What is wrong with how a command refuses: it shall be one line with these words, and 1."""
    code, said = process.wait(300), process.errors.read_text().strip()
    if code != 1:
        return f"exit code {code}"
    if len(said.splitlines()) != 1 or "Traceback" in process.output.read_text():
        return f"more than one line: {said}"
    missing = [str(word) for word in words if str(word) not in said]
    return f"{missing} not in: {said}" if missing else ""


def size(folder):
    """Bytes of the files of a folder; they may go away meanwhile."""
    total = 0
    for path in Path(folder).rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total
