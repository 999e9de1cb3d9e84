"""What an installed wheel must do without any extra: `make dist` runs it."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from ripple_attention import RippleAttention
from ripple_lab.results import committed_results

layer = RippleAttention(dim=32, num_heads=2)
x = torch.randn(1, 5, 7, 32, requires_grad=True)
layer(x).sum().backward()
assert x.grad is not None and x.grad.isfinite().all()

assert committed_results().of_kind("runs"), "the wheel has no result files"


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr
    return done.stdout.strip()


ripple = Path(sys.executable).with_name("ripple")
assert run(ripple, "--version") == version("ripple-attention")
run(sys.executable, "-c", "import torch, ripple_attention")  # no warning, as of a missing NumPy
print(f"ripple-attention {version('ripple-attention')}, torch {torch.__version__}: works")
