"""Ripple attention in a vision transformer of timm, in place of its own attention.

Run it with: python examples/timm_model.py
"""

import timm
import torch

from ripple_attention import RippleAttention


class GridAttention(RippleAttention):
    """Ripple attention for tokens in a row, as timm's blocks pass them."""

    def __init__(self, dim: int, num_heads: int, grid_size: tuple[int, int]):
        super().__init__(dim, num_heads)
        self.grid_size = grid_size

    def forward(self, x, attn_mask=None, is_causal=False):
        assert attn_mask is None and not is_causal, "these have no meaning here"
        return super().forward(x, grid_size=self.grid_size)


def swap(model: torch.nn.Module) -> None:
    """Gives every block ripple attention, with the weights of its `qkv` and `proj`."""
    for block in model.blocks:
        old = block.attn
        new = GridAttention(model.embed_dim, old.num_heads, model.patch_embed.grid_size)
        missing, unexpected = new.load_state_dict(old.state_dict(), strict=False)
        invented = [name for name in missing if name.startswith(("qkv", "proj"))]
        if invented or unexpected:
            raise ValueError(f"weights without a place: {unexpected}; without a value: {invented}")
        block.attn = new


def describe(name: str, model: torch.nn.Module) -> None:
    size = sum(p.numel() for p in model.parameters()) / 1e6
    with torch.no_grad():
        logits = model.eval()(torch.randn(1, 3, 224, 224))
    print(f"{name:>9}: {size:.2f} M parameters, logits {tuple(logits.shape)}")


def main() -> None:
    # A class token has no place on the grid, so this model pools its tokens.
    model = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg")
    describe("softmax", model)
    swap(model)
    describe("ripple", model)
    print("New: feature maps and spatial weights. Everything else kept its weights.")


if __name__ == "__main__":
    main()
