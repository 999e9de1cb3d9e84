"""The image encoder of SAM 2 with ripples in its global blocks, aligned on photos without labels.

Run it with: python examples/sam2.py PHOTOS --weights sam2.safetensors --output ripples.safetensors
The weights are those of timm's model; timm downloads them unless you name a file.
"""

import argparse
import copy
import json
from pathlib import Path

from rich.console import Console
from safetensors.torch import save_file

from ripple_attention.convert import convert
from ripple_lab.align import align, errors
from ripple_lab.align.models import Photos, find_photos, load_pretrained


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path, help="a folder")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--output", type=Path, default=Path("sam2-ripples.safetensors"))
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--count", type=int, help="use this many photos")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    pretrained = load_pretrained("sam2_hiera_tiny", options.weights, options.side)
    to_learn, held_out = (Photos(x, pretrained) for x in find_photos(options.photos, options.count))
    teacher = pretrained.model.to(options.device)
    model = copy.deepcopy(teacher)
    report = convert(model, max_distance=8)  # blocks 5, 7 and 9; the others attend within windows
    print(report)

    before = errors(model, teacher, held_out)
    align(model, teacher, to_learn, steps=options.steps, console=Console())
    for name, error in errors(model, teacher, held_out).items():
        print(f"{name}: relative squared error {before[name]:.3f}, aligned {error:.3f}")
    save_file(model.state_dict(), options.output)
    options.output.with_suffix(".json").write_text(json.dumps(report.config))
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
