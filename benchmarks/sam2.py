r"""SAM 2's tiny image encoder with ripples: do its masks stay?

Align first, then measure:

    ripple align sam2_hiera_tiny PETS/train --weights SAM2/trunk.safetensors --side 1024 \
        --count 24 --steps 60 --keep-lessons --max-distance 4 --output r4.safetensors
    python benchmarks/sam2.py SAM2 PETS/val r4.safetensors --photos 16 \
        --aligned-by "60 steps on 21 photos"

A further model adds its row to the CSV.

SAM2 holds the encoder in timm's names (trunk.safetensors), SAM 2's neck (neck.safetensors), and its
prompt encoder and mask decoder (mask_decoder.onnx). PETS/val holds photos and, beside each, its
trimap: 1 animal, 2 background, 3 border. The decoder gets the box of the animal.
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv2d, interpolate

from ripple_attention.convert import convert, converted
from ripple_lab.align.lessons import lesson_error, listening
from ripple_lab.align.models import Photos, load_pretrained
from ripple_lab.files import write_csv
from ripple_lab.machine import hardware, slug
from ripple_lab.results import read_csv

SIDE = 1024  # what the decoder knows


def decoder_inputs(model: Any, neck: dict[str, Tensor], image: Tensor) -> list[Tensor]:
    """The embedding (1, 256, 64, 64) and two finer maps."""
    stages = model.forward_intermediates(image, intermediates_only=True)
    names = [f"neck.convs.{3 - i}.conv" for i in range(4)]
    maps = [
        conv2d(x, neck[f"{name}.weight"], neck[f"{name}.bias"])
        for x, name in zip(stages, names, strict=True)
    ]
    embedding = maps[2] + interpolate(maps[3], scale_factor=2) + neck["no_mem_embed"].view(-1, 1, 1)
    names = [f"sam_mask_decoder.conv_s{i}" for i in range(2)]
    fine = [
        conv2d(x, neck[f"{name}.weight"], neck[f"{name}.bias"])
        for x, name in zip(maps, names, strict=False)
    ]
    return [embedding, *fine]


def mask_of(decoder: Any, inputs: list[Tensor], box: np.ndarray) -> np.ndarray:
    """The mask (256, 256) that the decoder finds best."""
    names = ("image_embed", "high_res_feats_0", "high_res_feats_1")
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    given["point_coords"] = box.reshape(1, 2, 2)
    given["point_labels"] = np.array([[2, 3]], np.float32)  # the corners of a box
    given["mask_input"] = np.zeros((1, 1, 256, 256), np.float32)
    given["has_mask_input"] = np.zeros(1, np.float32)
    masks, quality = decoder.run(None, given)
    return masks[0, quality[0].argmax()] > 0


def iou(one: np.ndarray, other: np.ndarray, where: np.ndarray) -> float:
    return float((one & other & where).sum() / max(((one | other) & where).sum(), 1))


def measure(folder: Path, photos: list[Path], aligned: list[Path]) -> list[dict[str, Any]]:
    """A row for each aligned model: means over the photos."""
    pretrained = load_pretrained("sam2_hiera_tiny", folder / "trunk.safetensors", SIDE)
    teacher: Any = pretrained.model
    neck = {name: x.float() for name, x in load_file(folder / "neck.safetensors").items()}
    decoder = onnxruntime.InferenceSession(folder / "mask_decoder.onnx")
    models: dict[Path, Any] = {}
    for path in aligned:
        models[path] = copy.deepcopy(teacher)
        convert(models[path], **json.loads(path.with_suffix(".json").read_text()))
        models[path].load_state_dict(load_file(path), strict=True)
    found: dict[Path, list[dict[str, float]]] = {path: [] for path in aligned}
    for photo in photos:
        trimap = Image.open(photo.with_suffix(".png")).resize((256, 256), Image.Resampling.NEAREST)
        labels = np.array(trimap)
        y, x = np.nonzero(labels != 2)
        box = np.array([x.min(), y.min(), x.max() + 1, y.max() + 1], np.float32) * SIDE / 256
        image = Photos([photo], pretrained).read(photo)[None]
        for path, model in models.items():
            row = {}
            with torch.no_grad(), listening(model, teacher) as lessons:
                wanted = decoder_inputs(teacher, neck, image)
                for name, attention in converted(model):
                    row[name] = float(lesson_error(attention, lessons[name]))
                inputs = decoder_inputs(model, neck, image)
            masks = [mask_of(decoder, maps, box) for maps in (wanted, inputs)]
            sure, animal = labels != 3, labels == 1
            row["iou_unchanged"], row["iou"] = (iou(mask, animal, sure) for mask in masks)
            row["masks_alike"] = iou(*masks, np.ones_like(sure))
            row["embedding_error"] = float((inputs[0] - wanted[0]).norm() / wanted[0].norm())
            found[path].append(row)
            print(photo.name, path.name, {k: round(x, 3) for k, x in row.items()}, flush=True)
    return [
        {
            "model": path.stem,
            **json.loads(path.with_suffix(".json").read_text()),
            "photos": len(rows),
            **{name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]},
            "hardware": hardware(torch.device("cpu")),
        }
        for path, rows in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("photos_folder", type=Path)
    parser.add_argument("aligned", type=Path, nargs="+")
    parser.add_argument("--photos", type=int, default=64)
    parser.add_argument("--aligned-by", default="", help="how, in words, for the CSV")
    parser.add_argument("--output", type=Path)
    words = parser.parse_args()
    photos = sorted(words.photos_folder.glob("*.jpg"))[: words.photos]
    rows = measure(words.folder, photos, words.aligned)
    rows = [{**row, "aligned_by": words.aligned_by} for row in rows]
    name = f"sam2-masks-{slug(hardware(torch.device('cpu')))}.csv"
    output = words.output or Path("benchmarks/results") / name
    names = {row["model"] for row in rows}
    others = (
        [row for row in read_csv(output) if row["model"] not in names] if output.exists() else []
    )
    write_csv(others + rows, output)
    print(f"Wrote {output}")


if __name__ == "__main__":
    main()
