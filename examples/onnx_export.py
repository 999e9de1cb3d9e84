"""Exports a ripple vision transformer to ONNX, as plain operations, and runs it in onnxruntime.

Run it with: python examples/onnx_export.py ripple.onnx
It needs the extras `vision` and `export`.
"""

import sys
from pathlib import Path

import onnxruntime
import timm
import torch

import ripple_attention.models  # noqa: F401  (makes the names known to timm)


def main(path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("ripple_tiny4_patch2_32", patch_size=8, depth=2).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.onnx.export(
        model, (images,), path, dynamo=True, verbose=False, input_names=["images"],
        output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    print(f"wrote {path}")
    for size in (1, 5):  # any batch size works
        images = torch.randn(size, 3, 32, 32)
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            difference = (torch.from_numpy(logits) - model(images)).abs().max()
        print(f"batch of {size}: logits {logits.shape} differ from PyTorch's by {difference:.0e}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "ripple.onnx"))
