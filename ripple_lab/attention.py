"""What a recipe may decide of the attention of its network; imported at once."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from ripple_lab.checks import at_least, at_most

LARGEST = 4096  # of a distance in tokens, and of features: far beyond any use, soon built


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Options of linear and ripple attention. What is None is as the named model has it."""

    max_distance: int | None = None
    """R_max: tokens at this distance and beyond are one group."""
    partition: Literal["chebyshev", "logarithmic", "foveal", "dense"] | None = None
    """How rings grow with distance; "dense" is for classifiers, whose grid has one size."""
    tile: int | None = None
    """Rows and columns of the tiles of foveal rings."""
    near: Literal["features", "softmax"] | None = None
    """How tokens inside the rings are weighed."""
    weights: Literal["stick-breaking", "fixed", "softmax", "truncated"] | None = None
    """Kind of spatial weights."""
    balanced: bool | None = None
    """Whether stick-breaking weights start uniform."""
    halt_threshold: float | None = None
    """τ: what is left of the stick when a ripple halts."""
    tail: Literal["share", "printed"] | None = None
    """How halted groups share what is left."""
    feature_map: str | None = None
    """Name of φ."""
    num_features: int | None = None
    """M: how many features φ has."""
    scaling: Literal["none", "scaled", "unit", "unit-scaled"] | None = None
    """The length that queries and keys are brought to before φ."""
    eps: float | None = None
    """What is added to the denominator of linear and ripple attention."""
    implementation: str | None = None
    """Algorithm of ripple attention."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("max_distance", "num_features", "tile")}
        given = {name: value for name, value in given.items() if value is not None}
        at_least(1, **given)
        at_most(LARGEST, **given)

    def attention_options(self) -> dict[str, Any]:
        """What is decided, as arguments of an attention's class."""
        given = {f.name: getattr(self, f.name) for f in fields(AttentionSpec)}
        scaling = given.pop("scaling")
        given["feature_map_options"] = None if scaling is None else {"scaling": scaling}
        return {name: value for name, value in given.items() if value is not None}
