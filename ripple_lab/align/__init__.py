"""A converted model learns to do what it did: from its own softmax model, without labels."""

from ripple_lab.align.align import align
from ripple_lab.align.learning import features_of
from ripple_lab.align.lessons import errors
from ripple_lab.align.plan import plan

__all__ = ["align", "errors", "features_of", "plan"]
