"""What a recipe of classification decides beside what all recipes do."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from ripple_lab.attention import AttentionSpec
from ripple_lab.checks import at_least, at_most, fraction
from ripple_lab.data.spec import Augmentation, DataSpec, Mixing
from ripple_lab.train.recipe import Recipe


@dataclass(frozen=True)
class ModelSpec(AttentionSpec):
    """Which network. What is None is as the named model has it."""

    name: str = "ripple_tiny_patch2_32"
    """A vision transformer of timm's; `ripple models` lists ours."""
    drop_path: float = 0.1
    """Probability that a residual branch of the last layer is left out; earlier ones less."""
    position_embeddings: bool = True
    """Learned absolute position embeddings."""
    class_token: bool = False
    """Our DeiT and DeiT-LA: classify a class token in place of the tokens' mean."""
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
    rotary: bool | None = None
    """Whether ripple attention turns queries and keys by their positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(drop_path=self.drop_path)
        sizes = ("depth", "width", "heads", "patch_size", "image_size")
        given = {name: getattr(self, name) for name in sizes}
        at_least(1, **{name: value for name, value in given.items() if value is not None})
        at_most(1000, depth=self.depth or 0)
        at_least(0, mlp_ratio=self.mlp_ratio or 0)


@dataclass(frozen=True)
class ClassificationRecipe(Recipe):
    """Everything that decides the result of training a classifier."""

    task: ClassVar[str] = "classification"

    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    augmentation: Augmentation = field(default_factory=Augmentation)
    mixing: Mixing = field(default_factory=Mixing)
    label_smoothing: float = 0.1
    """Probability spread over all classes."""
    ema_decay: float | None = 0.99996
    """Also keep a running mean of the weights, of this decay; None for no mean."""

    def __post_init__(self) -> None:
        fraction(label_smoothing=self.label_smoothing)
        super().__post_init__()

    @property
    def mixes(self) -> bool:
        return self.mixing.mixup > 0 or self.mixing.cutmix > 0

    def _create_model(self) -> Any:
        from ripple_lab.train.network import create_model

        return create_model(self.model, self.data.num_classes)

    def create_module(self) -> Any:
        from ripple_lab.train.classifier import Classifier

        return Classifier(self)

    def smoke_run(self) -> Self:
        """Its own model on noise."""
        short = super().smoke_run()
        data = DataSpec(
            name="synthetic",
            num_classes=self.data.num_classes,
            count=2 * short.batch_size,
            in_memory=self.data.in_memory,
        )
        return replace(short, data=data)
