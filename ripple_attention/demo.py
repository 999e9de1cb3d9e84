"""A small ripple classifier on scikit-learn's digits, and a picture of the ripples it learned."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress, TextColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from ripple_attention.modules import RippleAttention, record_spatial_weights
from ripple_attention.partition import Partition, chebyshev


@dataclass(frozen=True)
class DemoConfig:
    """The demo's settings; the defaults take about a minute on two CPU cores."""

    epochs: int = 24
    batch_size: int = 48
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's digits, enlarged from 8×8 to 32×32 pixels, in [−1, 1]."""

    train_images: Tensor  # (1437, 1, 32, 32)
    train_labels: Tensor
    test_images: Tensor  # (360, 1, 32, 32)
    test_labels: Tensor

    @classmethod
    def load(cls) -> "Digits":
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        images = F.interpolate(images, size=(32, 32), mode="bilinear")
        labels = torch.from_numpy(digits.target)
        train, test = train_test_split(range(len(labels)), test_size=360, random_state=0)
        return cls(images[train], labels[train], images[test], labels[test])


class Block(nn.Module):
    """A transformer block with ripple attention, on a grid of tokens (B, H, W, C)."""

    def __init__(self, dim: int, num_heads: int, partition: Partition):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = RippleAttention(dim, num_heads, partition=partition)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class RippleClassifier(nn.Module):
    """Patches of 4×4 pixels → blocks of ripple attention → mean over the tokens → 10 classes."""

    def __init__(self, dim: int = 64, depth: int = 4, num_heads: int = 4, max_distance: int = 4):
        super().__init__()
        self.partition = chebyshev(max_distance)
        self.patch_embed = nn.Conv2d(1, dim, kernel_size=4, stride=4)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 8, 8, dim))
        self.blocks = nn.Sequential(*(Block(dim, num_heads, self.partition) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 1, 32, 32) → logits (B, 10)."""
        x = self.patch_embed(images).permute(0, 2, 3, 1)  # (B, 8, 8, C)
        x = self.blocks(x + self.pos_embed)
        return self.head(self.norm(x).mean((1, 2)))


def run(output: Path, config: DemoConfig, console: Console) -> float:
    """Trains, prints and returns the accuracy, and writes `ripples.png` into the folder."""
    from ripple_attention.plots import draw_learned_ripples

    torch.manual_seed(config.seed)
    digits, model = Digits.load(), RippleClassifier()
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"Training a ripple classifier ({count:,} parameters, 4 layers, 8×8 tokens) on "
        f"{len(digits.train_labels):,} digits for {config.epochs} epochs on the CPU."
    )
    start = time.perf_counter()
    note = TextColumn("{task.fields[note]}")
    with Progress(*Progress.get_default_columns(), note, console=console) as progress:
        task = progress.add_task("epochs", total=config.epochs, note="")
        for loss in train(model, digits, config):
            progress.update(task, advance=1, note=f"loss {loss:.3f}")
    correct = accuracy(model, digits.test_images, digits.test_labels)
    console.print(
        f"Accuracy on {len(digits.test_labels)} digits it has not seen: [bold]{correct:.1%}[/bold] "
        f"after {time.perf_counter() - start:.0f} s of training."
    )
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "ripples.png"
    examples = [int((digits.test_labels == label).nonzero()[0]) for label in (0, 3, 7)]
    images = digits.test_images[examples]
    with torch.no_grad(), record_spatial_weights(model) as weights:
        model(images)
    draw_learned_ripples(images[:, 0], list(weights.values()), model.partition, picture)
    console.print(f"The ripples it learned: [bold]{picture}[/bold]")
    return correct


def train(model: nn.Module, digits: Digits, config: DemoConfig) -> Iterator[float]:
    """Trains in place and yields the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    batches = len(digits.train_labels) // config.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * batches, pct_start=0.15
    )
    model.train()
    for _ in range(config.epochs):
        losses = []
        order = torch.randperm(len(digits.train_labels))
        for index in order[: batches * config.batch_size].view(batches, -1):
            logits = model(shifted(digits.train_images[index]))
            loss = F.cross_entropy(logits, digits.train_labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)


def shifted(images: Tensor, by: int = 3) -> Tensor:
    """Each image moved by up to `by` pixels, the border repeated."""
    padded = F.pad(images, (by, by, by, by), mode="replicate")
    windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # (B, 1, 2·by+1, 2·by+1, 32, 32)
    down, across = torch.randint(0, 2 * by + 1, (2, len(images)))
    return windows[torch.arange(len(images)), :, down, across]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The fraction of images whose most likely class is right."""
    model.eval()
    return (model(images).argmax(-1) == labels).float().mean().item()
