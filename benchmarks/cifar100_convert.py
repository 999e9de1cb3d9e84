r"""A trained DeiT of CIFAR-100 turned into ripples: top-1 before, at once, aligned and tuned.

    ripple train cifar100-deit-tiny --data.root data --output runs/deit
    python benchmarks/cifar100_convert.py runs/deit/model.safetensors --data data --device cuda

All of its layers are converted, aligned on training images without labels, and then tuned with
labels for at most 15 epochs: crop, flip, mixup and cutmix. A CSV gets a row for each stage.
--quick runs all of it for two steps on noise; then a file of weights may be left out.
"""

import argparse
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn.functional import pad

from ripple_attention import models  # noqa: F401  (its names are timm's, too)
from ripple_attention.convert import convert, converted
from ripple_lab.align import align, errors
from ripple_lab.data.cifar100 import load_cifar100
from ripple_lab.data.images import Images
from ripple_lab.data.synthetic import synthetic_images
from ripple_lab.files import write_csv
from ripple_lab.machine import hardware, slug
from ripple_lab.train.weights import read_weights

NAME = "deit6_tiny_patch2_32"


def load_model(path: Path | None) -> nn.Module:
    """The network in a file that `ripple train` wrote; a new one without a file."""
    if path is None:
        return timm.create_model(NAME, num_classes=100)
    weights, metadata = read_weights(path)
    spec = json.loads(metadata["recipe"])["model"]
    classes = len(json.loads(metadata["classes"]))
    options = {"num_classes": classes, "drop_path_rate": spec["drop_path"]}
    model = timm.create_model(spec["name"], **options)
    model.load_state_dict(weights, strict=True)
    return model


class Batches:
    """Normalised images that are on the device already, the same each time."""

    def __init__(self, images: Tensor, model: Any, size: int):
        config, device = model.default_cfg, images.device
        self.images, self.size = images, size
        self.mean, self.std = (
            torch.tensor(config[name], device=device)[:, None, None] for name in ("mean", "std")
        )

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.images.split(self.size):
            yield self.normalised(part)

    def normalised(self, images: Tensor) -> Tensor:
        return (images / 255 - self.mean) / self.std


def crop_and_flip(images: Tensor) -> Tensor:
    """Each image moved by up to four pixels, and mirrored or not."""
    B, _, S, _ = images.shape
    device = images.device
    shifts = torch.randint(9, (2, B, 1), device=device)
    places = torch.arange(S, device=device)
    columns = torch.where(torch.rand(B, 1, device=device) < 0.5, places, places.flip(0))
    rows, columns = places + shifts[0], columns + shifts[1]  # (B, S)
    wide = pad(images, (4, 4, 4, 4)).movedim(1, -1)  # (B, S + 8, S + 8, 3)
    index = torch.arange(B, device=device)[:, None, None]
    return wide[index, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


@torch.no_grad()
def top1(model: nn.Module, batches: Batches, labels: Tensor) -> float:
    """In percent."""
    model.eval()
    right = sum(
        int((model(images).argmax(-1) == own).sum())
        for images, own in zip(batches, labels.split(batches.size), strict=True)
    )
    return 100 * right / len(labels)


def tune(model: Any, train: Batches, labels: Tensor, words: Any) -> None:
    """Trains all of a model with labels, as DeiT is, at a small learning rate."""
    mixup = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=model.num_classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=words.rate, weight_decay=0.05)
    device, count = labels.device, len(labels) // words.batch
    steps = words.epochs * count
    model.train().requires_grad_(True)
    for step in range(steps):
        if step % count == 0:
            order = torch.randperm(len(labels), device=device)
        chosen = order[step % count * words.batch :][: words.batch]
        images = train.normalised(crop_and_flip(train.images[chosen]))
        images, targets = mixup(images, labels[chosen])
        rate = words.rate * min(1, (step + 1) / (0.05 * steps))
        rate *= (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = rate
        half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        with half:
            logits = model(images)
        loss = SoftTargetCrossEntropy()(logits.float(), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % count == 0:
            print(f"epoch {(step + 1) // count}: loss {float(loss.detach()):.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, nargs="?")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--max-distance", type=int, default=4)
    parser.add_argument("--near", default="softmax")
    parser.add_argument("--steps", type=int, default=300, help="of the alignment")
    parser.add_argument("--block-steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rate", type=float, default=2e-4, help="of tuning")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--implementation", default="auto", help="tiled_triton: kernels by name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--quick", action="store_true")
    words = parser.parse_args()
    if words.weights is None and not words.quick:
        parser.error("name the file of weights of a trained DeiT")
    torch.manual_seed(0)
    device = torch.device(words.device)
    model = load_model(words.weights).to(device).eval()
    if words.quick:
        words.steps, words.block_steps, words.epochs, words.batch = 2, 2, 1, 4
        sets = [synthetic_images(8, 32, 100, seed=seed) for seed in (1, 0)]
    else:
        sets = [load_cifar100(words.data, train=train) for train in (True, False)]
    splits: list[tuple[Batches, Tensor]] = []
    for some in sets:
        assert isinstance(some, Images)
        batches = Batches(some.images.to(device), model, words.batch)
        splits.append((batches, some.labels.long().to(device)))
    (train, labels), test = splits

    rows: list[dict[str, Any]] = []
    file = f"cifar100-convert-{slug(hardware(device))}.csv"
    results = words.results or Path("benchmarks/results") / file

    def note(stage: str, **more: Any) -> None:
        row = {"stage": stage, "top1": round(top1(model, *test), 2), "near": words.near}
        row |= {"max_distance": words.max_distance, "steps": words.steps}
        row |= {"block_steps": words.block_steps, "epochs": words.epochs, **more}
        rows.append(row | {"hardware": hardware(device)})
        write_csv(rows, results)
        print(rows[-1], flush=True)

    note("softmax")
    teacher = copy.deepcopy(model)
    convert(model, "all", near=words.near, max_distance=words.max_distance)
    for _, attention in converted(model):
        attention.ripple.implementation = words.implementation
    note("converted")
    steps = {"steps": words.steps, "block_steps": words.block_steps}
    align(model, teacher, train, **steps, console=Console(width=200))
    few = Batches(test[0].images[: 4 * words.batch], model, words.batch)
    found = errors(model, teacher, few).values()
    note("aligned", worst_block=round(max(found), 4))
    if words.epochs:
        tune(model, train, labels, words)
        note("tuned")


if __name__ == "__main__":
    main()
