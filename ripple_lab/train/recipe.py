"""A recipe: everything that decides the result of a training run, typed.

What all recipes share is here; `classification` and `detection` add what is theirs.
"""

import json
import re
from collections.abc import Set
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_type_hints

from typeguard import TypeCheckError, check_type

from ripple_lab.checks import at_least, at_most, fraction
from ripple_lab.console import did_you_mean
from ripple_lab.files import parse_json

T = TypeVar("T")

# Where the data are looked for: nothing that a run computes depends on it.
PLACES = frozenset({"data.root", "data.download"})
# What, beside hardware, decides nothing about what is learned, but for rounding: a run that goes on
# may have others. `data.source` and `data.in_memory` may not change: another source may number its
# images otherwise, and images one by one draw other augmentations than those in memory.
MAY_CHANGE = PLACES | {
    "validate_every",
    "checkpoint_minutes",
    "log_every",
    "model.implementation",  # rounds otherwise, as other hardware does, which may lack its kernels
}


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW, linear warm-up, then a cosine or drops, by the step."""

    lr: float = 5e-4
    """The largest learning rate."""
    warmup_lr: float = 1e-6
    """The first learning rate."""
    min_lr: float = 1e-5
    """The last learning rate of a cosine."""
    warmup_epochs: int = 5
    """Epochs until the largest."""
    drops: tuple[int, ...] | None = None
    """The epochs after which the learning rate falls to a tenth; None for a cosine."""
    weight_decay: float = 0.05
    """Of AdamW."""
    decay_everything: bool = False
    """Whether weight decay is also on biases, norms and position embeddings, as DETR has it."""
    decay_feature_maps: bool = True
    """Whether weight decay is also on the matrices of learned feature maps."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None for no clipping."""

    def __post_init__(self) -> None:
        at_least(0, warmup_lr=self.warmup_lr, min_lr=self.min_lr, weight_decay=self.weight_decay)
        at_least(0, warmup_epochs=self.warmup_epochs)
        if not self.lr > 0 or (self.clip is not None and not self.clip > 0):
            raise ValueError(f"lr and clip must be above 0; got lr={self.lr}, clip={self.clip}")
        if self.drops is not None and not all(epoch >= 1 for epoch in self.drops):
            raise ValueError(f"drops are epochs, 1 or later; got drops={self.drops}")


@dataclass(frozen=True)
class Hardware:
    """What a run may change without changing what is computed, but for rounding."""

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where it runs."""
    devices: int = 1
    """GPUs, or processes on the CPU, on each node."""
    nodes: int = 1
    """Machines."""
    precision: Literal["bf16-mixed", "16-mixed", "32-true"] = "bf16-mixed"
    """Arithmetic."""
    compile: bool = False
    """Use torch.compile: slower to start, faster to run."""
    graphs: bool = True
    """Replay training steps as CUDA graphs where that is possible: faster, the same numbers."""
    workers: int = 8
    """Processes that decode images, where they are not in memory."""
    stop_after_minutes: float | None = None
    """Write a checkpoint and stop after this time; `--resume` goes on."""

    def __post_init__(self) -> None:
        at_least(1, devices=self.devices, nodes=self.nodes)
        at_least(0, workers=self.workers)
        if self.stop_after_minutes is not None:
            at_least(0, stop_after_minutes=self.stop_after_minutes)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a run."""

    task: ClassVar[str]

    name: str = "own"
    """What the run is called."""
    model: Any = None
    data: Any = None
    augmentation: Any = None
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    epochs: int = 300
    """Passes over the training images."""
    batch_size: int = 512
    """Images of a step, over all devices."""
    ema_decay: float | None = None
    """Also keep a running mean of the weights, of this decay; None for no mean."""
    seed: int = 0
    """Of weights, order and augmentation."""
    validate_every: int = 1
    """Epochs between evaluations; there is always one at the end."""
    checkpoint_minutes: float = 15.0
    """Time between checkpoints; there is always one at the end."""
    log_every: int = 10
    """Steps that one line of the metrics sums up."""
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        at_least(1, epochs=self.epochs, batch_size=self.batch_size, log_every=self.log_every)
        at_least(1, validate_every=self.validate_every)
        at_least(0, seed=self.seed, checkpoint_minutes=self.checkpoint_minutes)
        at_most(2**32 - 1, seed=self.seed)  # NumPy's largest
        if self.ema_decay is not None:
            fraction(ema_decay=self.ema_decay)
        if self.optimizer.warmup_epochs >= self.epochs:
            raise ValueError(
                "the warm-up must end before the run does: optimizer.warmup_epochs < epochs; got "
                f"optimizer.warmup_epochs={self.optimizer.warmup_epochs}, epochs={self.epochs}"
            )
        world = self.hardware.devices * self.hardware.nodes
        unit = 2 * world if self.mixes else world
        if self.batch_size % unit:
            why = ", in pairs for mixup" if self.mixes else ""
            raise ValueError(
                f"batch_size is that of all devices{why}: it must be a multiple of {unit}; "
                f"got batch_size={self.batch_size} for {world} devices"
            )

    @property
    def mixes(self) -> bool:
        """Whether the images of a batch are mixed, in pairs."""
        return False

    def create_model(self) -> Any:
        """Its network alone, with fresh weights."""
        try:
            return self._create_model()
        except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
            of_sizes = re.search("allocat|overflow|dimension", str(error))  # torch's words
            if isinstance(error, RuntimeError) and not of_sizes:
                raise
            reason = (str(error).splitlines() or ["there is not enough memory"])[0]
            raise ValueError(
                f"the network of the recipe {self.name} cannot be made: {reason}. See that the "
                "sizes among its fields, --model.…, are of the right kind and not too large"
            ) from error

    def _create_model(self) -> Any:
        raise NotImplementedError

    def create_module(self) -> Any:
        """What Lightning trains: a `TrainedModule` with fresh weights."""
        raise NotImplementedError

    def without_start(self) -> Self:
        """The recipe without weights to start from: its model will get them from a file."""
        return self

    def smoke_run(self) -> Self:
        """The recipe as a smoke run: two steps on synthetic images, on the CPU.

        What replaces its data is the task's to say.
        """
        return replace(
            self,
            epochs=1,
            batch_size=2 * self.hardware.devices * self.hardware.nodes,
            optimizer=replace(self.optimizer, warmup_epochs=0),
            hardware=replace(
                self.hardware, accelerator="cpu", precision="32-true", compile=False, workers=0
            ),
        )

    def to_json(self) -> str:
        return json.dumps({"task": self.task, **asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str | bytes, origin: str = "the text") -> "Recipe":
        """The recipe that `to_json` wrote; what is left out has its default."""
        try:
            values = parse_json(text)
        except ValueError as error:  # not even text, perhaps
            raise ValueError(f"a recipe is JSON; {origin} is not: {error}") from None
        kind = task_recipe("classification")
        if isinstance(values, dict) and "task" in values:
            kind = task_recipe(values.pop("task"), f" in {origin}")
        return _build(kind, values, origin)

    @staticmethod
    def read(path: Path) -> "Recipe":
        return Recipe.from_json(path.read_bytes(), str(path))


def task_recipe(task: Any, where: str = "") -> type[Recipe]:
    """The kind of recipe that a task has."""
    from ripple_lab.train.classification import ClassificationRecipe
    from ripple_lab.train.detection import DetectionRecipe

    known: dict[str, type[Recipe]] = {
        kind.task: kind for kind in (ClassificationRecipe, DetectionRecipe)
    }
    if not isinstance(task, str) or task not in known:
        raise ValueError(f"a recipe's task{where} is one of {', '.join(known)}; got {task!r}")
    return known[task]


def differences(old: Recipe, new: Recipe, aside: Set[str] = frozenset()) -> list[str]:
    """The fields, hardware and those set aside left out, in which two recipes differ, with both
    values."""
    before, after = (_flat(asdict(replace(r, hardware=Hardware()))) for r in (old, new))
    return [
        f"{name}: {before.get(name)} → {after.get(name)}"
        for name in {**before, **after}
        if name not in aside and before.get(name) != after.get(name)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _build(kind: type[T], values: Any, origin: str) -> T:
    """A dataclass of nested dictionaries, every name and type checked."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} in {origin} must be an object; got {values!r}")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    unknown = values.keys() - set(known)
    if unknown:
        shown = ", ".join([name[:80] for name in sorted(unknown)[:3]] + ["…"] * (len(unknown) > 3))
        raise ValueError(
            f"{kind.__name__} in {origin} has no field {shown}: "
            f"{did_you_mean(min(unknown), known)}Its fields are {', '.join(known)}"
        )
    built = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            built[name] = _build(hints[name], value, origin)  # type: ignore[arg-type]
            continue
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if isinstance(value, str):
            value = getattr(kind, "RENAMED", {}).get(value, value)
        try:
            if isinstance(value, bool) and bool not in (hints[name], *get_args(hints[name])):
                raise TypeCheckError("true and false are no numbers")
            built[name] = check_type(value, hints[name])
        except TypeCheckError as error:
            reason = "; ".join(line.strip() for line in str(error).splitlines())
            raise ValueError(
                f"{kind.__name__}.{name} in {origin}: {value!r} will not do: {reason}"
            ) from None
    try:
        return kind(**built)
    except ValueError as error:
        raise ValueError(f"{kind.__name__} in {origin}: {error}") from None
