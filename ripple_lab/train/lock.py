"""One process at a time in the folder of a run."""

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
    """Another process trains in the same folder."""


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock; an empty folder that it made goes away again.

    The kernel releases the lock when the process ends, however it ends. On NFS it holds between
    hosts where the server supports locks.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        raise RunInUseError(
            f"one process at a time trains in a folder; in {folder} that is {_holder(path)}. Wait "
            "for it or end it, or name another folder, --output"
        ) from None
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        if made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace") or "another"
    return "another"
