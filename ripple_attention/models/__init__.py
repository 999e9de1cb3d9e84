"""The paper's models. Importing this package makes them known to `timm.create_model`."""

from importlib.util import find_spec

if find_spec("timm") is None:
    raise ModuleNotFoundError(
        "ripple_attention.models needs timm, which is not installed. In the checkout:\n"
        "    pip install '.[vision]'",
        name="timm",
    )

from ripple_attention.models.registry import MODELS, adapt_state_dict, count_parameters
from ripple_attention.models.vit import ATTENTIONS, GridVisionTransformer

__all__ = ["ATTENTIONS", "MODELS", "GridVisionTransformer", "adapt_state_dict", "count_parameters"]
