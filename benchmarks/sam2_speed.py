r"""Time and memory of SAM 2's tiny image encoder with ripples in its global blocks, beside SDPA.

    python benchmarks/sam2_speed.py --weights SAM2/trunk.safetensors --device cuda

In bfloat16, block by block compiled, as CUDA graphs, all systems in turns; each is checked in
float32 before it is timed. Three parts: the whole encoder; the attention of the three global blocks
with their projections; and what lies between the projections ("mixing"). Without --weights they are
drawn. Rows are written as they come; with --seconds, nothing is started after so long.
"""

import argparse
import copy
import time
import traceback
from pathlib import Path
from typing import Any

import timm
import torch
import torch._dynamo.config
from sam2 import add_row
from sam2_align import HEADS, VARIANTS, WIDTH, compute_by, kernels_of, turn
from timm.models import load_state_dict
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ripple_attention.convert import converted
from ripple_lab.bench import measure
from ripple_lab.machine import hardware, slug

BLOCKS = (5, 7, 9)
PARTS = ("encoder", "attention", "mixing")
SOFTMAX = "softmax"
AGREEMENT = 0.02  # relative error that bfloat16 may have, or twice softmax's


def make(name: str, weights: Path | None, device: str) -> nn.Module:
    """The encoder with a variant's ripples, in float32, computed by PyTorch alone."""
    torch.manual_seed(0)
    model = timm.create_model("sam2_hiera_tiny", num_classes=0).eval().requires_grad_(False)
    if weights is not None:
        model.load_state_dict(load_state_dict(str(weights)), strict=False)
    if name != SOFTMAX:
        turn(model, name)
        far = "partition" in VARIANTS[name]
        for _, attention in converted(model):
            attention.ripple.implementation = "tile_sums" if far else "tiled"
            if hasattr(attention.ripple, "spatial_weights"):  # else all rings would weigh the same
                nn.init.normal_(attention.ripple.spatial_weights.embedding, std=0.5)
    return model.to(device)


def calls_of(model: Any, side: int, compiled: bool) -> dict[str, measure.Step]:
    """What is timed: each part as something to call. It returns what it computes."""
    weight = next(model.parameters())
    generator = torch.Generator(weight.device).manual_seed(0)
    grid = (side // 16, side // 16)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device=weight.device)
        return x.to(weight.dtype)

    image, maps = draw(1, 3, side, side), [draw(1, *grid, HEADS * WIDTH) for _ in BLOCKS]
    qkv = draw(3, 1, grid[0] * grid[1], HEADS, WIDTH)
    attentions = [model.blocks[i].attn for i in BLOCKS]
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
        attentions = [torch.compile(attention, dynamic=False) for attention in attentions]

    def mix(attention: Any) -> Tensor:
        if hasattr(attention, "ripple"):
            return attention.ripple(*qkv, grid_size=grid)
        return scaled_dot_product_attention(*qkv.transpose(2, 3)).transpose(1, 2)

    mixes = [mix] * len(BLOCKS)
    if compiled:
        mixes = [torch.compile(mix, dynamic=False)] * len(BLOCKS)

    def attend() -> Tensor:
        pairs = zip(attentions, maps, strict=True)
        return torch.stack([attention(x) for attention, x in pairs])

    def mix_all() -> Tensor:
        return torch.stack([f(model.blocks[i].attn) for f, i in zip(mixes, BLOCKS, strict=True)])

    steps = (lambda: model.forward_features(image), attend, mix_all)
    return dict(zip(PARTS, steps, strict=True))


def run(words: Any, side: int, deadline: float) -> None:
    """Checks and times all systems at one size."""
    device = torch.device(words.device)
    timed: dict[str, dict[str, measure.Step]] = {part: {} for part in PARTS}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name in (SOFTMAX, *words.only.split(",")):
        if time.monotonic() > deadline:
            break
        exact_model = make(name, words.weights, words.device)
        model = copy.deepcopy(exact_model).bfloat16()
        if name != SOFTMAX and device.type == "cuda":
            compute_by(model, kernels_of(name))
        exact, own = calls_of(exact_model, side, False), calls_of(model, side, words.compile)
        for part in PARTS:
            row = {"system": name, "part": part, "side": side, "tokens": (side // 16) ** 2}
            rows[name, part] = row
            try:
                out, ref = own[part]().float(), exact[part]()
                row["error"] = float((out - ref).norm() / ref.norm())
                allowed = max(AGREEMENT, 2 * rows[SOFTMAX, part]["error"])
                row["status"] = "ok" if row["error"] <= allowed else "wrong"
                del out, ref
                if row["status"] == "ok":
                    row["peak_mb"] = round(measure.peak_bytes(own[part], device) / 1e6, 1)
                    timed[part][name] = own[part]
            except Exception as error:
                said = (str(error).strip().splitlines() or [""])[0]
                row["status"] = f"failed: {type(error).__name__}: {said}"
            print(row, flush=True)
        del exact, exact_model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    try:
        for part, steps in timed.items():
            graphs = device.type == "cuda"
            times = measure.interleaved_seconds(steps, device, words.rounds, 5.0, as_graphs=graphs)
            for name, samples in times.items():
                rows[name, part] |= measure.summary(samples)
    except Exception:  # what is known is written
        traceback.print_exc()
    common = {"hardware": hardware(device), "torch": torch.__version__, "dtype": "bfloat16"}
    common["compiled"] = words.compile
    for row in rows.values():
        add_row(row | common, words.results, "system", "part", "side")
        base = rows.get((SOFTMAX, row["part"]), {}).get("median_ms")
        faster = f"{base / row['median_ms']:.2f} × softmax" if base and "median_ms" in row else ""
        print(side, row["part"], row["system"], row.get("median_ms"), faster, flush=True)


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--only", default="r8-far,r4-far,r8,r4,windows")
    parser.add_argument("--sides", default="1024,2048,4096")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    words = parser.parse_args()
    file = f"sam2-speed-{slug(hardware(torch.device(words.device)))}.csv"
    words.results = words.results or Path("benchmarks/results") / file
    torch._dynamo.config.recompile_limit = 256  # blocks share their code
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    with torch.no_grad():
        for side in map(int, words.sides.split(",")):
            if time.monotonic() - start < words.seconds:
                run(words, side, start + words.seconds)
                torch.compiler.reset()
            else:
                print(f"{side}: no time left")


if __name__ == "__main__":
    main()
