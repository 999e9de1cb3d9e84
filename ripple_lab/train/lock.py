"""One process at a time in the folder of a run, or at a file."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
PATIENCE = 1.0  # seconds: a run that is just ending is waited for


class RunInUseError(ValueError):
    """Another process writes to the same place."""


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Makes the folder of a run and holds its lock; an empty folder that it made goes away again.

    The kernel releases the lock when the process ends, however it ends. On NFS it holds between
    hosts where the server supports locks.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _locked(folder / LOCK, f"trains in a folder; in {folder}"):
            yield
    finally:
        if made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


@contextmanager
def only_process_at(path: Path) -> Iterator[None]:
    """The same for one file that a process writes, whose folder it makes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f".{path.name}{LOCK}"), f"writes a file; of {path}"):
        yield


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise RunInUseError(
            f"one process at a time {what} that is {_holder(path)}. Wait for it or end it, or name "
            "another place, --output"
        ) from None
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") or "another"
    return "another"
