"""With what, where and how a run was started."""

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ripple_lab.machine import hardware

PACKAGES = ("ripple-attention", "torch", "triton", "timm", "torchvision", "lightning", "numpy")


def environment() -> dict[str, Any]:
    """With what, where and how a run was started."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": ["ripple", *sys.argv[1:]],
        "git_revision": git_revision(),
        "hardware": hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }


def git_revision() -> str | None:
    """The revision of this package's source, with "+changes" where it was edited."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        words: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "check": True}
        revision = subprocess.run([*git, "rev-parse", "HEAD"], **words).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], **words).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changed else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
