"""SAM 2's tiny image encoder with ripples: do its masks stay? `sam2_align.py` has the command.

SAM2 holds the encoder in timm's names (trunk.safetensors), SAM 2's neck (neck.safetensors), and its
prompt encoder and mask decoder (mask_decoder.onnx). PETS/val holds photos and, beside each, its
trimap: 1 animal, 2 background, 3 border. The decoder gets the box of the animal.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate

from ripple_attention.convert import converted
from ripple_lab.align.lessons import lesson_error, listening
from ripple_lab.align.models import Photos, load_pretrained
from ripple_lab.files import write_csv
from ripple_lab.results import read_csv

SIDE = 1024  # what the decoder knows


def lateral(x: Tensor, neck: dict[str, Tensor], stage: int) -> Tensor:
    name = f"neck.convs.{3 - stage}.conv"
    return conv2d(x, neck[f"{name}.weight"], neck[f"{name}.bias"])


def embed(third: Tensor, fourth: Tensor, neck: dict[str, Tensor]) -> Tensor:
    """Maps of the last two stages → the embedding (B, 256, S/16, S/16)."""
    upper = interpolate(lateral(fourth, neck, 3), scale_factor=2)
    return lateral(third, neck, 2) + upper + neck["no_mem_embed"].view(-1, 1, 1)


def decoder_inputs(model: Any, neck: dict[str, Tensor], images: Tensor) -> list[Tensor]:
    """The embedding and two finer maps."""
    *first, third, fourth = model.forward_intermediates(images, intermediates_only=True)
    fine = []
    for stage, x in enumerate(first):
        name = f"sam_mask_decoder.conv_s{stage}"
        x = lateral(x, neck, stage)
        fine.append(conv2d(x, neck[f"{name}.weight"], neck[f"{name}.bias"]))
    return [embed(third, fourth, neck), *fine]


class Judge:
    """Measures changed encoders against the unchanged one; masks at 1024 × 1024 pixels only.

    Args:
        folder: SAM2.
        photos: With their trimaps beside them.
        side: Pixels of an image's side.
        device: Where the encoders run, in float32. The decoder runs on the CPU.
    """

    def __init__(self, folder: Path, photos: list[Path], side: int = SIDE, device: str = "cpu"):
        self.pretrained = load_pretrained("sam2_hiera_tiny", folder / "trunk.safetensors", side)
        self.teacher: Any = self.pretrained.model.to(device)
        neck = load_file(folder / "neck.safetensors", device=device)
        self.neck = {name: x.float() for name, x in neck.items()}
        self.photos, self.decoder = photos, None
        self.images = Photos(photos, self.pretrained, keep_on=torch.device(device))
        self.unchanged: dict[Path, np.ndarray] = {}  # masks
        if side == SIDE:
            import onnxruntime

            self.decoder = onnxruntime.InferenceSession(folder / "mask_decoder.onnx")

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Means over the photos."""
        rows = []
        for photo, image in zip(self.photos, self.images, strict=True):
            with listening(model, self.teacher) as lessons:
                wanted = decoder_inputs(self.teacher, self.neck, image)
                row = {
                    name: float(lesson_error(attention, lessons[name]))
                    for name, attention in converted(model)
                }
                inputs = decoder_inputs(model, self.neck, image)
            row |= self.compare_masks(photo, wanted, inputs) if self.decoder else {}
            row["embedding_error"] = float((inputs[0] - wanted[0]).norm() / wanted[0].norm())
            rows.append(row)
        return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}

    def compare_masks(
        self, photo: Path, wanted: list[Tensor], inputs: list[Tensor]
    ) -> dict[str, float]:
        masks, labels = self.masks(photo, wanted, inputs)
        sure, animal = labels != 3, labels == 1
        unchanged, own = (iou(mask, animal, sure) for mask in masks)
        alike = iou(*masks, np.ones_like(sure))
        return {"iou_unchanged": unchanged, "iou": own, "masks_alike": alike}

    def masks(
        self, photo: Path, wanted: list[Tensor], inputs: list[Tensor]
    ) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The masks (256, 256) of the unchanged encoder and of a changed one; and the trimap."""
        trimap = Image.open(photo.with_suffix(".png")).resize((256, 256), Image.Resampling.NEAREST)
        labels = np.array(trimap)
        y, x = np.nonzero(labels != 2)
        box = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1], np.float32) * SIDE / 256
        if photo not in self.unchanged:
            self.unchanged[photo] = self.mask(wanted, box)
        return (self.unchanged[photo], self.mask(inputs, box)), labels

    def mask(self, inputs: list[Tensor], box: np.ndarray) -> np.ndarray:
        """The mask (256, 256) that the decoder finds best."""
        names = ("image_embed", "high_res_feats_0", "high_res_feats_1")
        given = {name: x.cpu().numpy() for name, x in zip(names, inputs, strict=True)}
        given["point_coords"] = box.reshape(1, 2, 2)
        given["point_labels"] = np.array([[2, 3]], np.float32)  # the corners of a box
        given["mask_input"] = np.zeros((1, 1, 256, 256), np.float32)
        given["has_mask_input"] = np.zeros(1, np.float32)
        masks, quality = self.decoder.run(None, given)
        return masks[0, quality[0].argmax()] > 0


def iou(one: np.ndarray, other: np.ndarray, where: np.ndarray) -> float:
    return float((one & other & where).sum() / max(((one | other) & where).sum(), 1))


def find_jpegs(folder: Path, count: int | None = None) -> list[Path]:
    found = sorted(folder.glob("*.jpg"))[:count]
    if not found:
        raise SystemExit(f"There are no photos (*.jpg) in {folder}")
    return found


def add_row(row: dict[str, Any], path: Path, *keys: str) -> None:
    """Adds a row to a CSV, in the place of one that has the same keys."""
    others = read_csv(path) if path.exists() else []
    others = [other for other in others if any(other[key] != row[key] for key in keys)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv([*others, row], path)
