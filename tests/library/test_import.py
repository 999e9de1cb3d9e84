"""`import ripple_attention` needs torch alone."""

import subprocess
import sys

HEAVY = [
    "triton",
    "torchvision",
    "timm",
    "lightning",
    "matplotlib",
    "sklearn",
    "typer",
    "rich",
    "onnx",
]


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_works_where_only_torch_is_installed():
    run(
        "import sys\n"
        "import torch\n"
        f"for name in {HEAVY}: sys.modules.setdefault(name, None)\n"
        "import ripple_attention\n"
        "layer = ripple_attention.RippleAttention(32, num_heads=2)\n"
        "layer(torch.randn(1, 6, 6, 32)).sum().backward()\n"
    )


def test_models_without_timm_name_the_extra_that_brings_it():
    printed = run(
        "import sys\n"
        "sys.modules['timm'] = None\n"
        "try:\n"
        "    from ripple_attention import models\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error)\n"
    )
    assert "needs timm" in printed and "pip install '.[vision]'" in printed


def test_import_brings_nothing_heavy_that_torch_does_not():
    extra = run(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import ripple_attention\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    ).split()
    assert "ripple_attention" in extra
    assert not set(extra) & {*HEAVY, "numpy", "scipy", "PIL", "pandas"}
