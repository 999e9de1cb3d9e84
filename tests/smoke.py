"""What an installed wheel must do with torch alone: `make dist` runs it."""

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

ripple = Path(sys.executable).with_name("ripple")
printed = subprocess.run([ripple, "--version"], capture_output=True, text=True, check=True)
assert printed.stdout.strip() == version("ripple-attention"), printed.stdout
assert not printed.stderr, printed.stderr
print(f"ripple-attention {version('ripple-attention')} with torch {torch.__version__}: works alone")
