"""SMCA's decoder: each query looks near a place of its own.

Gao et al., *Fast Convergence of DETR with Spatially Modulated Co-Attention* (2021).
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torchvision.ops import MLP

from ripple_lab.detection.encoder import feedforward, init_linear

CLASS_BIAS = -math.log(99)  # a class is there with probability 0.01 at the start


def log_gaussian(centre: Tensor, scale: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """The logarithm of a Gaussian over the cells, up to a constant: at most 0, at its centre.

        −(s_x²·(c_x − x)² + s_y²·(c_y − y)²) ÷ 8

    The cell in row i and column j lies at x = j, y = i.

    Args:
        centre: (…, 2): x and y in cells.
        scale: (…, 2): s_x and s_y; the standard deviation is 2/|s| cells.
        grid_size: (H, W).

    Returns:
        (…, H, W).
    """
    along_x, along_y = (
        -((scale[..., axis, None] * (centre[..., axis, None] - cells)) ** 2) / 8
        for axis, cells in enumerate(torch.arange(n, device=centre.device) for n in grid_size[::-1])
    )
    return along_y[..., :, None] + along_x[..., None, :]


class DecoderLayer(nn.Module):
    """Queries look at each other, then each head at the image around its own point.

    Args:
        dim: Channels of a token, C.
        num_heads: How many heads, N.
        feedforward_dim: Between the two linear layers.
        dropout: Of attention and of what is added.
    """

    def __init__(self, dim: int, num_heads: int, feedforward_dim: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.self_attn = nn.MultiheadAttention(dim, num_heads, dropout, batch_first=True)
        self.norm1 = nn.LayerNorm(dim)
        self.norm_point = nn.LayerNorm(dim)
        self.offset = nn.Linear(dim, 2 * num_heads)
        self.scale = nn.Linear(dim, 2 * num_heads)
        self.cross_attn = nn.MultiheadAttention(dim, num_heads, dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = feedforward(dim, feedforward_dim, dropout)
        self.norm3 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        init_linear(self.offset, self.self_attn.out_proj, self.cross_attn.out_proj, *self.mlp)
        nn.init.zeros_(self.scale.weight)
        nn.init.ones_(self.scale.bias)

    def forward(
        self,
        x: Tensor,
        queries: Tensor,
        reference: Tensor,
        keys: Tensor,
        values: Tensor,
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        """Updates the queries.

        Args:
            x: (B, Q, C): the queries so far.
            queries: (B, Q, C): learned embeddings that tell queries apart, like positions.
            reference: (B, Q, 2): their places, x and y in cells.
            keys: (B, H, W, C): encoded cells with their positions.
            values: (B, H, W, C): encoded cells.
            key_padding_mask: Bool (B, H, W), True for cells outside their image, or None.

        Returns:
            (B, Q, C).
        """
        marked = x + queries
        prior = self.prior(self.norm_point(marked), reference, (keys.shape[1], keys.shape[2]))
        if key_padding_mask is not None:
            prior = prior.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        x = self.norm1(x + self.dropout(self.self_attn(marked, marked, x, need_weights=False)[0]))
        attended, _ = self.cross_attn(
            x + queries,
            keys.flatten(1, 2),
            values.flatten(1, 2),
            attn_mask=prior.flatten(3).flatten(0, 1).to(x.dtype),  # (B·N, Q, H·W)
            need_weights=False,
        )
        x = self.norm2(x + self.dropout(attended))
        return self.norm3(x + self.mlp(x))

    def prior(self, x: Tensor, reference: Tensor, grid_size: tuple[int, int]) -> Tensor:
        """Where each head of a query looks, regardless of what is there.

        Args:
            x: (B, Q, C).
            reference: (B, Q, 2), in cells.
            grid_size: (H, W).

        Returns:
            Logits (B, N, Q, H, W), float32 or better.
        """
        offset, scale = (
            layer(x).to(reference.dtype).unflatten(-1, (self.num_heads, 2)).transpose(1, 2)
            for layer in (self.offset, self.scale)
        )  # each (B, N, Q, 2)
        return log_gaussian(reference[:, None] + offset, scale, grid_size)


class Decoder(nn.Module):
    """A stack of layers that turns queries into classes and boxes.

    Args:
        num_classes: Logits of a query; each is an independent yes or no.
        num_layers: How many.
        num_queries: Q, the most objects that an image can have.
        dim: Channels of a token, C.
        num_heads: N; divides `dim`.
        feedforward_dim: Between the two linear layers of each layer.
        dropout: Of attention and of what is added.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        num_layers: int = 6,
        num_queries: int = 300,
        dim: int = 256,
        num_heads: int = 8,
        feedforward_dim: int = 2048,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.queries = nn.Embedding(num_queries, dim)
        self.reference = MLP(dim, [dim, dim, 2], inplace=False)
        self.layers = nn.ModuleList(
            DecoderLayer(dim, num_heads, feedforward_dim, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.classes = nn.Linear(dim, num_classes)
        self.boxes = MLP(dim, [dim, dim, 4], inplace=False)
        init_linear(*self.reference)
        nn.init.constant_(self.classes.bias, CLASS_BIAS)

    def forward(
        self,
        memory: Tensor,
        positions: Tensor,
        image_size: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Classes and boxes after every layer.

        Args:
            memory: (B, H, W, C): encoded cells.
            positions: (B, H, W, C), of the cells.
            image_size: (B, 2): width and height of each image in cells, not rounded.
            key_padding_mask: Bool (B, H, W), True for cells outside their image, or None.

        Returns:
            Logits (layers, B, Q, classes) and boxes (layers, B, Q, 4): centre x, y, width and
            height as parts of the image, float32 or better.
        """
        queries = self.queries.weight
        # A query starts without knowing the image, so its place is the same in every image. Places
        # are float32 even under autocast: in half precision neighbours would coincide.
        norm_point = cast(nn.LayerNorm, self.layers[0].norm_point)
        place = self.reference(norm_point(queries))
        place = place.to(torch.promote_types(place.dtype, torch.float32))  # logits, (Q, 2)
        reference = place.sigmoid() * image_size[:, None]  # (B, Q, 2)
        queries = queries.repeat(len(memory), 1, 1)  # (B, Q, C)
        x, known = torch.zeros_like(queries), []
        for layer in self.layers:
            x = layer(x, queries, reference, memory + positions, memory, key_padding_mask)
            known.append(self.norm(x))
        after = torch.stack(known)  # (layers, B, Q, C)
        centre, size = self.boxes(after).to(place.dtype).split(2, -1)
        return self.classes(after), torch.cat([centre + place, size], -1).sigmoid()
