"""Ripple attention in a vision transformer of timm, class token and all, and back.

Run it with: python examples/timm_model.py
With timm's weights: python examples/timm_model.py --pretrained
"""

import argparse
import copy

import timm
import torch

from ripple_attention.convert import convert, revert


def describe(name: str, model: torch.nn.Module, images: torch.Tensor, ref: torch.Tensor) -> None:
    size = sum(p.numel() for p in model.parameters()) / 1e6
    with torch.no_grad():
        features = model.forward_features(images)  # (B, 1 + H·W, C)
    error = (features - ref).norm() / ref.norm()
    print(f"{name:>22}: {size:.2f} M parameters, features off by {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    softmax = timm.create_model(
        "vit_small_patch16_224", pretrained=options.pretrained, dynamic_img_size=True
    ).eval()
    images = torch.randn(1, 3, 128, 192)  # need not be square
    with torch.no_grad():
        ref = softmax.forward_features(images)
    describe("softmax", softmax, images, ref)

    for name, reach in (("ripples, all near", 12), ("ripples to distance 4", 4)):
        model = copy.deepcopy(softmax)
        report = convert(model, max_distance=reach)
        describe(name, model, images, ref)
    print(report)

    revert(model)
    describe("softmax again", model, images, ref)


if __name__ == "__main__":
    main()
