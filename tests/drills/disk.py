"""Runs on a disk that is too small for them."""

import os
import subprocess
from contextlib import contextmanager

from drills import drill
from drills.runs import gone_on, reference, refusal, size, train


@drill("full disk", "one line names file and remedy; with more space, --resume ends the run")
def full_disk(folder, short):
    if os.geteuid() != 0:
        print("full disk: not run, mounting a small file system needs root")
        return
    whole = reference(folder)
    most = size(whole) // 1024
    count = 1 if short else 12
    for number in range(count):
        kilobytes = most * (number + 1) // (count + 1)
        with tmpfs(folder / f"disk-{number}", kilobytes) as disk:
            run = disk / "run"
            told = "cannot be written: No space left on device. Free some space on that disk"
            wrong = refusal(train(run, beside=folder), run, told)
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            yield "a tmpfs smaller than the run", wrong or gone_on(run, whole, beside=folder)


@contextmanager
def tmpfs(folder, kilobytes):
    folder.mkdir()
    size = f"size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
