"""The examples run as they are, and what they print is right."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(capsys, monkeypatch, name, *words):
    """What an example prints, run in this process."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) < 60
    assert re.search(rf"^Run it with: .*examples/{path.name}", text, re.M)


def test_timm_model(capsys, monkeypatch):
    output = printed(capsys, monkeypatch, "timm_model.py")
    found = re.findall(r"([\d.]+) M parameters, features off by (\S+)", output)
    sizes = [float(size) for size, _ in found]
    before, all_near, some_near, again = (float(error) for _, error in found)
    assert before == again == 0 and all_near < 1e-5 < some_near
    assert sizes[0] == sizes[3] and 0 < sizes[2] - sizes[0] < 1


def test_sam2(capsys, monkeypatch, tmp_path):
    torch.manual_seed(0)
    weights, output = tmp_path / "weights.safetensors", tmp_path / "ripples.safetensors"
    save_file(timm.create_model("sam2_hiera_tiny").state_dict(), weights)
    for number in range(2):
        Image.effect_noise((80, 60), 90).convert("RGB").save(tmp_path / f"{number}.jpg")
    words = ("--side", "128", "--steps", "2", "--weights", str(weights), "--output", str(output))
    told = printed(capsys, monkeypatch, "sam2.py", str(tmp_path), *words)
    assert re.findall(r"blocks\.(\d)\.attn: relative", told) == ["5", "7", "9"]
    assert output.exists() and output.with_suffix(".json").exists()


def test_detr_encoder(capsys, monkeypatch):
    output = printed(capsys, monkeypatch, "detr_encoder.py")
    differences = re.findall(r"differ by (\S+)", output)
    assert len(differences) == 3
    assert all(float(difference) < 1e-5 for difference in differences)


def test_onnx_export(capsys, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    path = tmp_path / "ripple.onnx"
    output = printed(capsys, monkeypatch, "onnx_export.py", str(path))
    assert path.exists()
    found = re.findall(r"batch of (\d): logits \(\1, 100\) differ from PyTorch's by (\S+)", output)
    assert [size for size, _ in found] == ["1", "5"]
    assert all(float(difference) < 1e-5 for _, difference in found)


def test_several_gpus(tmp_path):
    """Here two processes of the CPU."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", EXAMPLES / "several_gpus.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) over 16 images", done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    assert "2 processes (gloo): weights agree" in done.stdout
