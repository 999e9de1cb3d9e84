"""Processes that start at once: forked from one that has imported what they need.

To import torch, timm and Lightning takes seconds, on slow machines fifteen, and what is tested in
processes of their own (signals, crashes, several devices) begins after that. `ripple` needs none.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [f"ripple_lab.{name}" for name in ("commands", "demo")]
    + [f"ripple_lab.train.{name}" for name in ("run", "classifier", "detector")]
)


def ripple(*words):
    """The command, run in this process; it measures briefly."""
    from typer.testing import CliRunner

    from ripple_lab.commands import app

    with mock.patch("ripple_lab.bench.measure.SAMPLE_SECONDS", 0.01):
        return CliRunner().invoke(app, [str(word) for word in words])


def start(target, *arguments):
    """A process that calls a function of a test module; it ends with the tests at the latest."""
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    with mock.patch.dict(os.environ, clean_environment(), clear=True):
        process.start()
    return process


def clean_environment():
    """Without what decides about colours, or tells Lightning that it is a part of a launch."""
    unwanted = "RANK", "WORLD_SIZE", "COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS"
    return {
        name: value
        for name, value in os.environ.items()
        if not any(part in name for part in unwanted)
    }


class Ripple:
    """The command `ripple` with these words; what it writes is in two files of the folder.

    Args:
        folder: Made if need be.
        words: What follows `ripple`.
        environment: What is set for it alone.
    """

    def __init__(self, folder, *words, **environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.output, self.errors = folder / "output", folder / "errors"
        words = [str(word) for word in words]
        self.process = start(_ripple, words, self.output, self.errors, environment)

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self, seconds=120):
        """Its exit code, negative where a signal ended it; None where it is killed for its time."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        return code


def _ripple(words, output, errors, environment):
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, stream.fileno())
        stream.reconfigure(line_buffering=True)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
    sys.argv = [str(Path(sys.executable).with_name("ripple")), *words]
    from ripple_lab.start import main

    main()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ripple_on_two_devices(folder, *words):
    """The command in two processes, as torchrun starts them; returns both when they have ended."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    common |= {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        Ripple(folder / f"rank-{rank}", *words, **common, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], "\n".join(rank.errors.read_text() for rank in ranks)
    return ranks


def in_two_ranks(target):
    """What a function of (rank, port), in a process each, gives for ranks 0 and 1."""
    port, results = free_port(), FORKS.SimpleQueue()
    processes = [start(_put_result, results, target, rank, port) for rank in range(2)]
    found = {}
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    for _ in processes:
        rank, value = results.get()
        found[rank] = value
    return found[0], found[1]


def _put_result(results, target, rank, port):
    results.put((rank, target(rank, port)))


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
