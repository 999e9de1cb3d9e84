"""The machine that this runs on."""

import platform
import re
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the CPU and its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = match.group(1).strip() if match else name
    return f"{name} ({torch.get_num_threads()} threads)"


def slug(text: str) -> str:
    """A text in a form that suits a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def available_bytes(device: torch.device) -> int:
    """Memory that is free for a measurement."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s*(\d+)", meminfo.read_text()) if meminfo.exists() else None
    return int(match.group(1)) * 1024 if match else 8 * 2**30
