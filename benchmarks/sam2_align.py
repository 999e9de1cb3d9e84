"""Ways to turn SAM 2's global blocks into ripples, each aligned and measured.

    python benchmarks/sam2_align.py SAM2 PETS --device cuda
    python benchmarks/sam2_align.py SAM2 PETS --device cuda --only r8-far --side 2048 --more 50

SAM2 and PETS are folders as in sam2.py. The first command aligns every variant on all of PETS/train
and measures it on PETS/val. The second one measures aligned variants at another size, once as they
are and once after 50 more steps there. Rows are added to a CSV as they come. With --seconds, a
command stops in time; the same one goes on from what lies in the folder --work.
"""

import argparse
import copy
import multiprocessing
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from sam2 import SIDE, Judge, add_row, embed, find_jpegs
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ripple_attention import foveal
from ripple_attention.convert import convert, converted
from ripple_attention.heads import RippleHeads
from ripple_lab.align import align
from ripple_lab.align.models import Photos
from ripple_lab.machine import hardware, slug
from ripple_lab.results import read_csv

VARIANTS: dict[str, dict[str, Any]] = {
    "r8-far": {"partition": foveal(8, tile=8, rings=2)},  # far rings to 15 and 31 tokens
    "r4-far": {"partition": foveal(4, tile=8, rings=2)},
    "r8": {"max_distance": 8},
    "r4": {"max_distance": 4},
    "windows": {"windows": 16},
    "hedgehog": {"near": "features", "feature_map": "hedgehog", "max_distance": 4},
    "paper": {"near": "features", "feature_map": "learned", "max_distance": 4},
}
MEASURING = 45.0  # seconds that are kept for it
HEADS, WIDTH = 4, 96  # of the blocks that attend globally
FIRST = 5  # of these blocks; those in front of it stay, so each photo passes them once


class Tail(nn.Module):
    """The blocks of an encoder from the first that changes, (B, H, W, C) → SAM 2's embedding."""

    def __init__(self, encoder: Any, neck: dict[str, Tensor]):
        super().__init__()
        self.neck, self.ends = neck, encoder.stage_ends[-2:]
        names = [str(i) for i in range(FIRST, len(encoder.blocks))]
        self.blocks = nn.ModuleDict({name: encoder.blocks[int(name)] for name in names})

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for name, block in self.blocks.items():
            x = block(x)
            if int(name) in self.ends:
                maps.append(x.permute(0, 3, 1, 2))
        return embed(*maps, self.neck)


@torch.no_grad()
def first_blocks(encoder: Any, photos: Photos) -> list[Tensor]:
    """What a tail takes of each batch of photos."""
    options = {"indices": [FIRST - 1], "coarse": False, "output_fmt": "NHWC"}
    return [
        encoder.forward_intermediates(images, intermediates_only=True, **options)[0]
        for images in photos
    ]


class Windows(RippleHeads):
    """Softmax within windows in the place of ripples: a baseline without parameters."""

    def __init__(self, size: int):
        nn.Module.__init__(self)
        self.size, self.num_heads, self.head_dim = size, HEADS, WIDTH

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        grid_size: tuple[int, int],
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        B, _, N, D = v.shape
        S, (rows, columns) = self.size, (length // self.size for length in grid_size)

        def split(x: Tensor) -> Tensor:
            x = x.view(B, rows, S, columns, S, N, D).permute(0, 1, 3, 5, 2, 4, 6)
            return x.reshape(-1, N, S * S, D)  # (B·windows, N, S², D)

        out = scaled_dot_product_attention(split(q), split(k), split(v))
        out = out.view(B, rows, columns, N, S, S, D).permute(0, 1, 4, 2, 5, 3, 6)
        return out.reshape(B, -1, N, D)


def turn(model: nn.Module, name: str) -> None:
    """Makes a variant of the unchanged encoder, in place."""
    settings = VARIANTS[name]
    if "windows" not in settings:
        convert(model, **settings)
        return
    convert(model, max_distance=1)
    for _, attention in converted(model):
        attention.ripple = Windows(settings["windows"])


def kernels_of(name: str) -> str:
    """What computes a variant on a GPU: near softmax takes kernels by name."""
    if "near" in VARIANTS[name] or "windows" in VARIANTS[name]:
        return "auto"
    return "tile_sums_triton" if "partition" in VARIANTS[name] else "tiled_triton"


def compute_by(model: nn.Module, implementation: str) -> None:
    for _, attention in converted(model):
        attention.ripple.implementation = implementation


def kernel_error(name: str, implementation: str, device: str) -> tuple[float, float]:
    """How far results and gradients are off float64, by kernels and by PyTorch, in bfloat16."""
    torch.manual_seed(0)
    heads = RippleHeads(WIDTH, HEADS, near="softmax", **VARIANTS[name]).to(device)
    nn.init.normal_(heads.spatial_weights.embedding, std=0.5)
    inputs, upstream = torch.randn(4, 2, 24 * 40, HEADS, WIDTH, device=device).split([3, 1])

    def results(by: str, dtype: torch.dtype) -> Tensor:
        own = copy.deepcopy(heads)
        own.implementation = by
        half = dtype == torch.bfloat16
        own, x = (own, inputs.to(dtype)) if half else (own.double(), inputs.double())
        x.requires_grad_()
        with torch.autocast(torch.device(device).type, dtype) if half else nullcontext():
            out = own(*x, grid_size=(24, 40))
        learned = [x, *own.parameters()]
        grads = torch.autograd.grad(out, learned, upstream[0].to(out.dtype))
        scaled = [x.double().flatten() / x.double().norm().clamp(min=1e-9) for x in (out, *grads)]
        return torch.cat(scaled)

    exact = results("naive", torch.float64)
    found = (results(by, torch.bfloat16) for by in (implementation, "tile_sums"))
    kernels, plain = (float((x - exact).norm() / exact.norm()) for x in found)
    return kernels, plain


def tried(name: str, device: str) -> str:
    """The kernels of a variant if they are right, else "auto"; the process that tries may die."""
    kernels = kernels_of(name)
    if kernels == "auto" or torch.device(device).type != "cuda":
        return "auto"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            own, plain = pool.submit(kernel_error, name, kernels, device).result()
        except Exception as error:
            print(f"{name}: {kernels} failed, PyTorch stands in: {error}", flush=True)
            return "auto"
    good = own <= max(0.02, 2 * plain)
    verdict = "agree" if good else "are wrong, PyTorch stands in"
    print(f"{name}: {kernels} {verdict}: {own:.1e} off, PyTorch's {plain:.1e}", flush=True)
    return kernels if good else "auto"


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    own = tuple(f"{name}." for name, _ in converted(model))
    return {name: x for name, x in model.state_dict().items() if name.startswith(own)}


def run_variant(words: Any, judge: Judge, inputs: list[Tensor], name: str, deadline: float) -> None:
    """Aligns and measures, if there is time enough."""
    model = copy.deepcopy(judge.teacher)
    turn(model, name)
    weights, checkpoint = (
        words.work / f"{name}.{end}" for end in ("safetensors", "align.safetensors")
    )
    steps = {"steps": words.steps, "block_steps": words.block_steps}
    if "windows" in VARIANTS[name]:  # what is new has no parameters
        steps = {"steps": 0, "block_steps": words.steps + words.block_steps}
    steps["feature_steps"] = words.feature_steps
    rates = {"learning_rate": words.learning_rate, "tuning_rate": words.tuning_rate}
    row = {"variant": name, "computed_by": tried(name, words.device)}
    compute_by(model, row["computed_by"])
    start = None if checkpoint.exists() else time.monotonic()
    rows = align(
        Tail(model, judge.neck),
        Tail(judge.teacher, judge.neck),
        inputs,
        **steps,
        **rates,
        keep_lessons=words.keep_lessons,
        checkpoint=checkpoint,
        seconds=deadline - MEASURING - time.monotonic(),
        console=Console(width=200),
    )
    if len(rows) < sum(steps.values()):
        print(f"{name}: stopped after {len(rows)} steps; the same command goes on", flush=True)
        return
    compute_by(model, "auto")
    row |= {**steps, **rates, "batch": words.batch, "photos_learned": sum(map(len, inputs))}
    row |= {"seconds": start and round(time.monotonic() - start), "side": words.side}
    row |= {"photos": len(judge.photos), **judge(model)}
    save_file(weights_of(model), weights)
    add_row({**row, "hardware": hardware(torch.device(words.device))}, words.results, "variant")
    checkpoint.unlink(missing_ok=True)
    print(row, flush=True)


def run_more(words: Any, judge: Judge, inputs: list[Tensor], name: str, deadline: float) -> None:
    """Measures an aligned variant at another size, before and after some more steps there."""
    model = copy.deepcopy(judge.teacher)
    turn(model, name)
    known = load_file(words.work / f"{name}.safetensors")
    if known.keys() != weights_of(model).keys():
        raise SystemExit(f"{name}.safetensors has other weights than {name}: align it again")
    model.load_state_dict(known, strict=False)
    by = tried(name, words.device)
    for steps in (0, words.more):
        if steps:
            compute_by(model, by)
            rows = align(
                Tail(model, judge.neck),
                Tail(judge.teacher, judge.neck),
                inputs,
                steps=0,
                block_steps=steps,
                tuning_rate=words.tuning_rate,
                seconds=deadline - MEASURING - time.monotonic(),
                console=Console(width=200),
            )
            if len(rows) < steps:
                print(f"{name}: no time left after {len(rows)} of {steps} steps", flush=True)
                return
            compute_by(model, "auto")
        row = {"variant": name, "side": words.side, "more_steps": steps, "computed_by": by}
        row |= {"batch": words.batch, "photos": len(judge.photos), **judge(model)}
        where = hardware(torch.device(words.device))
        add_row({**row, "hardware": where}, words.results, "variant", "side", "more_steps")
        print(row, flush=True)


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("pets", type=Path)
    parser.add_argument("--only", default=",".join(VARIANTS), help="variants, in this order")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--block-steps", type=int, default=300)
    parser.add_argument("--feature-steps", type=int, default=600)
    parser.add_argument("--more", type=int, help="steps at another --side, of what is aligned")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--tuning-rate", type=float, default=3e-5)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--learned", type=int, help="of how many photos; of all unless given")
    parser.add_argument("--photos", type=int, default=64, help="to measure on")
    parser.add_argument("--side", type=int, default=SIDE)
    parser.add_argument("--keep-lessons", action="store_true", help="40 MB a photo, on the device")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--work", type=Path, default=Path("runs/sam2-aligned"))
    parser.add_argument("--results", type=Path)
    words = parser.parse_args()
    names = words.only.split(",")
    if not {*names} <= {*VARIANTS}:
        parser.error(f"--only takes some of {', '.join(VARIANTS)}; got {words.only}")
    kind = "align" if words.more is None else "larger"
    file = f"sam2-{kind}-{slug(hardware(torch.device(words.device)))}.csv"
    words.results = words.results or Path("benchmarks/results") / file
    words.work.mkdir(parents=True, exist_ok=True)

    device = torch.device(words.device)
    judge = Judge(
        words.folder, find_jpegs(words.pets / "val", words.photos), words.side, words.device
    )
    paths = find_jpegs(words.pets / "train")
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist()
    paths = [paths[i] for i in order][: words.learned]
    photos = Photos(paths, judge.pretrained, words.batch, keep_on=device)
    inputs = first_blocks(judge.teacher, photos)
    print(f"{len(paths)} photos to learn from, {len(judge.photos)} to measure on", flush=True)

    deadline = started + words.seconds
    run: Callable[..., None] = run_variant if words.more is None else run_more
    measured = read_csv(words.results) if words.results.exists() and words.more is None else []
    for name in names:
        if any(row["variant"] == name for row in measured):
            print(f"{name}: measured already, in {words.results}")
        elif time.monotonic() > deadline - 2 * MEASURING:
            print(f"{name}: no time left; the same command goes on", flush=True)
        else:
            try:
                run(words, judge, inputs, name, deadline)
            except Exception:  # the others can still be measured
                traceback.print_exc()


if __name__ == "__main__":
    main()
