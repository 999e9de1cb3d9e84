"""How things are measured: time, peak memory, and what they ran on."""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from ripple_lab import machine

Step = Callable[[], object]

SAMPLE_SECONDS = 0.2  # runs in a row; a sample is their median


def seconds(step: Step, device: torch.device) -> float:
    """The wall-clock time of one step, until the device has finished."""
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def interleaved_seconds(
    steps: dict[str, Step],
    device: torch.device,
    rounds: int,
    patience: float,
    as_graphs: bool = False,
) -> dict[str, list[float]]:
    """Times of several steps, taken in turns so that other programs disturb all of them alike.

    Args:
        steps: What to time, by name.
        device: Where it runs.
        rounds: Samples of each.
        patience: Seconds after which a step gets no further sample (it always gets one).
        as_graphs: On a GPU, replay steps as CUDA graphs where possible: the time of their
            kernels, independent of the host.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    spent = dict.fromkeys(steps, 0.0)
    for _ in range(rounds):
        for name, step in steps.items():
            if spent[name] < patience:
                start = time.perf_counter()
                samples[name].append(_turn(step, device, as_graphs))
                spent[name] += time.perf_counter() - start
    return samples


def _turn(step: Step, device: torch.device, as_graph: bool) -> float:
    """The median of a few runs in a row, without the first, which finds others' data in caches.

    On a GPU by events on the device, its cache emptied before each run.
    """
    if device.type == "cuda":
        step()  # compiles kernels
    first = seconds(step, device)
    if device.type == "cuda" and first < SAMPLE_SECONDS:
        from triton.testing import do_bench

        timed, milliseconds = _as_graph(step) if as_graph else step, 1e3 * SAMPLE_SECONDS / 2
        return float(do_bench(timed, warmup=25, rep=milliseconds, return_mode="median")) / 1e3
    runs = [seconds(step, device)]
    while sum(runs) + first < SAMPLE_SECONDS:
        runs.append(seconds(step, device))
    return statistics.median(runs)


def _as_graph(step: Step) -> Step:
    """A step as a CUDA graph, or as it is, with a warning, if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:  # it waits for the device, or memory is not there twice
        torch.cuda.synchronize()
        reason = str(error).splitlines()[0]
        warnings.warn(f"a step is timed as it is, not as a CUDA graph: {reason}", stacklevel=2)
        return step
    return graph.replay


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most memory that a step holds at a time, beyond what was held before."""
    if device.type == "cuda":
        _synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        _synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notes would fill the screen
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak


def matching_names(words: str, names: Iterable[str]) -> tuple[str, ...]:
    """The named ones among these; a word that is no name stands for all names that contain it.

    >>> matching_names("tiles,soft", ["tiles", "tiles by kernels", "softmax"])
    ('tiles', 'softmax')
    """
    known, parts = list(names), words.split(",")
    return tuple(
        name
        for name in known
        if any(part == name if part in known else part in name for part in parts)
    )


def default_path(kind: str, device: str, more: str) -> Path:
    """A CSV in benchmarks/results, where there is that folder, else right here."""
    folder = Path("benchmarks/results")
    hardware = machine.slug(machine.hardware(torch.device(device)))
    return (folder if folder.is_dir() else Path()) / f"{kind}-{hardware}-{more}.csv"


def summary(samples: list[float]) -> dict[str, float | int]:
    """Median and minimum in milliseconds, and the number of samples."""
    return {
        "median_ms": round(1e3 * statistics.median(samples), 4),
        "min_ms": round(1e3 * min(samples), 4),
        "samples": len(samples),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
