"""DETR's encoder with softmax, linear or ripple attention."""

import inspect
from typing import Any

from torch import Tensor, nn

from ripple_attention.modules import (
    GridAttention,
    LinearAttention,
    RippleAttention,
    SoftmaxAttention,
)

ATTENTIONS: dict[str, type[GridAttention]] = {
    "softmax": SoftmaxAttention,
    "linear": LinearAttention,
    "ripple": RippleAttention,
}


class EncoderLayer(nn.Module):
    """Attention, then two linear layers, each added to its input and normed after.

    Args:
        attention: The attention layer.
        dim: Channels of a token, C.
        feedforward_dim: Between the two linear layers.
        dropout: Of what is added.
    """

    def __init__(self, attention: GridAttention, dim: int, feedforward_dim: int, dropout: float):
        super().__init__()
        self.attn = attention
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = feedforward(dim, feedforward_dim, dropout)
        self.norm2 = nn.LayerNorm(dim)
        # Feature maps and spatial weights keep their own initialisation.
        init_linear(attention.qkv, attention.proj, *self.mlp)
        for layer in (attention.qkv, attention.proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)  # as in `nn.MultiheadAttention`

    def forward(self, x: Tensor, positions: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """As `Encoder.forward`."""
        attended = self.attn(x + positions, x, key_padding_mask=key_padding_mask)
        x = self.norm1(x + attended)
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Module):
    """A stack of layers over the cells of an image.

    Args:
        attention: "softmax", "linear" or "ripple".
        num_layers: How many.
        dim: Channels of a token, C.
        num_heads: N; divides `dim`.
        feedforward_dim: Between the two linear layers of each layer.
        dropout: Of what is added to the tokens, and of the probabilities of softmax attention.
        attention_options: Further arguments of the attention's class.
    """

    def __init__(
        self,
        attention: str = "ripple",
        *,
        num_layers: int = 6,
        dim: int = 256,
        num_heads: int = 8,
        feedforward_dim: int = 2048,
        dropout: float = 0.1,
        **attention_options: Any,
    ):
        super().__init__()
        if attention not in ATTENTIONS:
            known = ", ".join(ATTENTIONS)
            raise ValueError(f"attention must be one of {known}; got {attention!r}")
        kind = ATTENTIONS[attention]
        known_options = inspect.signature(kind).parameters.keys() - {"dim", "proj_drop"}
        unknown = attention_options.keys() - known_options
        if unknown:
            raise ValueError(
                f"{kind.__name__} has the options {', '.join(sorted(known_options))}; got "
                f"{', '.join(sorted(unknown))}: leave out what it lacks"
            )
        if kind is SoftmaxAttention:
            attention_options = {"attn_drop": dropout, **attention_options}

        def make_attention() -> GridAttention:
            return kind(dim, num_heads, proj_drop=dropout, **attention_options)

        self.layers = nn.ModuleList(
            EncoderLayer(make_attention(), dim, feedforward_dim, dropout) for _ in range(num_layers)
        )

    def forward(
        self, x: Tensor, positions: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Encodes the tokens.

        Args:
            x: (B, H, W, C).
            positions: In the shape of x; added for queries and keys, not for values.
            key_padding_mask: Bool (B, H, W), True for cells outside their image, or None if
                there are none. The outputs of those cells mean nothing.

        Returns:
            In the shape of x.
        """
        for layer in self.layers:
            x = layer(x, positions, key_padding_mask)
        return x


def feedforward(dim: int, hidden_dim: int, dropout: float) -> nn.Sequential:
    """The two linear layers of a transformer layer, dropout after each."""
    return nn.Sequential(
        nn.Linear(dim, hidden_dim),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden_dim, dim),
        nn.Dropout(dropout),
    )


def init_linear(*modules: nn.Module) -> None:
    """Gives linear layers among the modules Xavier's uniform weights, as in DETR."""
    for module in modules:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
