"""Runs that are killed at random moments, and gone on with."""

import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace

from rich.console import Console

from drills import drill
from drills.runs import FINAL, TINY, gone_on, reference, train
from processes import start, wait_for
from ripple_lab.train import run as runs
from ripple_lab.train.recorder import METRICS

MOMENTS = {"at any time": 14, "while a checkpoint is written": 16, "in the final export": 10}
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
EVENTS = {"while a checkpoint is written": 600, "in the final export": 12}  # in a whole run, about


@drill("kill -9, then --resume", "the final files are those of an undisturbed run, byte for byte")
def kills(folder, short):
    generator = random.Random(0)
    whole, begin = reference(folder), time.monotonic()
    process = start(train_until, None, 0, 0.0, folder / "timed")
    process.join()
    seconds = time.monotonic() - begin
    for moment, count in MOMENTS.items():
        for number in range(1 if short else count):
            run, code = folder / f"{moment.replace(' ', '-')}-{number}", 0
            while code == 0:  # it ended first: once more
                shutil.rmtree(run, ignore_errors=True)
                event = generator.randint(1, EVENTS.get(moment, 1))
                within = generator.uniform(1e-5, 1e-3 if moment in EVENTS else seconds)
                process = start(train_until, moment, event, within, run)
                process.join()
                code = process.exitcode
            yield moment, gone_on(run, whole) if code == -signal.SIGALRM else f"exit code {code}"


def train_until(moment, event, within, run):
    """Trains, and dies of a timer, started with the run or by so many operations on files.

    The timer is the kernel's: it ends the process as SIGKILL does, between any two instructions.
    """
    if moment in EVENTS:
        seen = 0

        def hook(name, arguments):
            nonlocal seen
            if name in FILE_EVENTS and is_aimed_at(moment, arguments[0]):
                seen += 1
                if seen == event:
                    signal.setitimer(signal.ITIMER_REAL, within)

        sys.addaudithook(hook)
    elif moment:
        signal.setitimer(signal.ITIMER_REAL, within)
    runs.train(TINY, run, Console(quiet=True))


SIGNALS = {
    "SIGHUP": [signal.SIGHUP],
    "SIGTERM": [signal.SIGTERM],
    "Ctrl-C": [signal.SIGINT],
    "SIGTERM, then Ctrl-C": [signal.SIGTERM, signal.SIGINT],
}
LONGER = replace(TINY, name="longer", epochs=12, checkpoint_minutes=15.0)


@drill(
    "signals", "one line names the checkpoint; --resume ends as an undisturbed run, byte for byte"
)
def signals(folder, short):
    whole = reference(folder, LONGER)
    for name, numbers in list(SIGNALS.items())[: 1 if short else None]:
        for count in range(1 if short else 4):
            run = folder / f"{name.replace(' ', '-')}-{count}"
            process = train(run, recipe=LONGER)
            wait_for(lambda path=run / METRICS: path.exists() and path.stat().st_size, 300)
            for number in numbers:
                process.send_signal(number)
                time.sleep(0.01)
            code, said = process.wait(300), process.errors.read_text()
            if code not in [128 + number for number in numbers]:
                yield name, f"exit code {code}: {said}"
            elif "the checkpoint is" not in said or len(said.splitlines()) != 1:
                yield name, f"it says: {said}"
            else:
                yield name, gone_on(run, whole, recipe=LONGER)


def is_aimed_at(moment, path):
    path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    if moment == "in the final export":
        return path.endswith(tuple(f"{name}{end}" for name in FINAL for end in ("", ".part"))) and (
            "checkpoints" not in path
        )
    return "/checkpoints/" in path
