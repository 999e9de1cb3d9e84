"""A recipe: everything that decides the result of a training run, typed."""

import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from typeguard import TypeCheckError, check_type

from ripple_attention.data.augment import Augmentation
from ripple_attention.feature_maps import Scaling
from ripple_attention.spatial_weights import Tail, WeightKind

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSpec:
    """Which network. What is None is as the named model has it."""

    name: str = "ripple_tiny_patch2_32"
    """A vision transformer of timm's; `ripple models` lists ours."""
    drop_path: float = 0.1
    """Probability that a residual branch of the last layer is left out; earlier ones less."""
    position_embeddings: bool = True
    """Learned absolute position embeddings."""
    depth: int | None = None
    """Layers."""
    width: int | None = None
    """Channels of a token."""
    heads: int | None = None
    """Heads of each attention layer."""
    mlp_ratio: float | None = None
    """Width of the MLPs, in widths of a token."""
    patch_size: int | None = None
    """Side of a patch in pixels."""
    image_size: int | None = None
    """Side of the images in pixels."""
    ripple_layers: int | None = None
    """How many layers, from the first, ripple."""
    max_distance: int | None = None
    """R_max: tokens at this distance and beyond are one group."""
    partition: Literal["chebyshev", "logarithmic", "dense"] | None = None
    """How rings grow with distance."""
    weights: WeightKind | None = None
    """Kind of spatial weights."""
    balanced: bool | None = None
    """Whether stick-breaking weights start uniform."""
    halt_threshold: float | None = None
    """τ: what is left of the stick when a ripple halts."""
    tail: Tail | None = None
    """How halted groups share what is left."""
    feature_map: str | None = None
    """Name of φ."""
    scaling: Scaling | None = None
    """The length that queries and keys are brought to before φ."""
    eps: float | None = None
    """What is added to the denominator of linear and ripple attention."""
    implementation: str | None = None
    """Algorithm of ripple attention."""

    def __post_init__(self) -> None:
        _fraction(drop_path=self.drop_path)
        sizes = ("depth", "width", "heads", "patch_size", "image_size", "max_distance")
        given = {name: getattr(self, name) for name in sizes}
        _at_least(1, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class DataSpec:
    """Which images."""

    name: Literal["cifar100", "imagenet", "digits", "made-up"] = "cifar100"
    """The data set; "imagenet" is any set of class folders."""
    root: str = "data"
    """The folder that holds it."""
    source: str = ""
    """For "imagenet", a data-set name of timm's: "" for folders or tars, "hfds/…" for the Hub."""
    download: bool = False
    """Fetch what is missing."""
    in_memory: bool = True
    """Keep all images on the device and augment whole batches there; else image by image."""
    num_classes: int = 100
    """How many classes it has."""
    count: int = 1024
    """Of made-up images: how many."""

    def __post_init__(self) -> None:
        _at_least(1, num_classes=self.num_classes, count=self.count)


@dataclass(frozen=True)
class Mixing:
    """Mixup and cutmix of the images of a batch, by timm."""

    mixup: float = 0.8
    """α of mixup; 0 for none."""
    cutmix: float = 1.0
    """α of cutmix; 0 for none."""
    switch: float = 0.5
    """Probability of cutmix where both are on."""

    def __post_init__(self) -> None:
        _at_least(0, mixup=self.mixup, cutmix=self.cutmix)
        _fraction(switch=self.switch)


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW, linear warm-up, cosine decay, by the step."""

    lr: float = 5e-4
    """The largest learning rate."""
    warmup_lr: float = 1e-6
    """The first learning rate."""
    min_lr: float = 1e-5
    """The last learning rate."""
    warmup_epochs: int = 5
    """Epochs until the largest."""
    weight_decay: float = 0.05
    """Not on biases, norms and position embeddings."""
    clip: float | None = 1.0
    """Largest norm of the gradient; None for no clipping."""

    def __post_init__(self) -> None:
        _at_least(0, warmup_lr=self.warmup_lr, min_lr=self.min_lr, weight_decay=self.weight_decay)
        _at_least(0, warmup_epochs=self.warmup_epochs)
        if not self.lr > 0 or (self.clip is not None and not self.clip > 0):
            raise ValueError(f"lr and clip must be above 0; got lr={self.lr}, clip={self.clip}")


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
    workers: int = 8
    """Processes that decode images, where they are not in memory."""
    stop_after_minutes: float | None = None
    """Write a checkpoint and stop after this time; `--resume` goes on."""

    def __post_init__(self) -> None:
        _at_least(1, devices=self.devices, nodes=self.nodes)
        _at_least(0, workers=self.workers)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a run."""

    name: str = "own"
    """What the run is called."""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    augmentation: Augmentation = field(default_factory=Augmentation)
    mixing: Mixing = field(default_factory=Mixing)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    epochs: int = 300
    """Passes over the training images."""
    batch_size: int = 512
    """Images of a step, over all devices."""
    label_smoothing: float = 0.1
    """Probability spread over all classes."""
    ema_decay: float | None = 0.99996
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
        _at_least(1, epochs=self.epochs, batch_size=self.batch_size, log_every=self.log_every)
        _at_least(1, validate_every=self.validate_every)
        _at_least(0, seed=self.seed, checkpoint_minutes=self.checkpoint_minutes)
        _fraction(label_smoothing=self.label_smoothing)
        if self.ema_decay is not None:
            _fraction(ema_decay=self.ema_decay)
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
        """Whether the images of a batch are mixed."""
        return self.mixing.mixup > 0 or self.mixing.cutmix > 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> "Recipe":
        """The recipe that `to_json` wrote; what is left out has its default."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a recipe is JSON; {origin} is not: {error}") from None
        return _build(cls, values, origin)

    @classmethod
    def read(cls, path: Path) -> "Recipe":
        return cls.from_json(path.read_text(encoding="utf-8"), str(path))


def smoke_run(recipe: Recipe) -> Recipe:
    """The recipe as a smoke run: its own model, two steps on made-up images, on the CPU."""
    batch_size = 2 * recipe.hardware.devices * recipe.hardware.nodes
    data = DataSpec(
        name="made-up",
        num_classes=recipe.data.num_classes,
        count=2 * batch_size,
        in_memory=recipe.data.in_memory,
    )
    return replace(
        recipe,
        data=data,
        epochs=1,
        batch_size=batch_size,
        optimizer=replace(recipe.optimizer, warmup_epochs=0),
        hardware=replace(
            recipe.hardware, accelerator="cpu", precision="32-true", compile=False, workers=0
        ),
    )


def differences(old: Recipe, new: Recipe) -> list[str]:
    """The fields, hardware aside, in which two recipes differ, with both values."""
    before, after = (_flat(asdict(replace(r, hardware=Hardware()))) for r in (old, new))
    return [
        f"{name}: {before[name]} → {after[name]}" for name in after if before[name] != after[name]
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
        raise ValueError(
            f"{kind.__name__} in {origin} has no field {', '.join(sorted(unknown))}; "
            f"its fields are {', '.join(known)}"
        )
    built = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            built[name] = _build(hints[name], value, origin)  # type: ignore[arg-type]
            continue
        try:
            built[name] = check_type(value, hints[name])
        except TypeCheckError as error:
            raise ValueError(
                f"{kind.__name__}.{name} in {origin}: {value!r} will not do: {error}"
            ) from None
    return kind(**built)


def _fraction(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1; got {name}={value}")


def _at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}; got {name}={value}")
