"""Starts the command `ripple`.

Ctrl-C is handled before anything slow is imported, so it prints one line from the start.
"""

import os
import signal
from types import FrameType


def main() -> None:
    """Imports the command, and runs it."""
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, leave)
    from ripple_lab.commands import main as run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def leave(number: int, frame: FrameType | None) -> None:
    """Exits at once: an interrupted import may swallow an exception, and nothing is written yet."""
    os.write(2, b"Stopped.\n")
    os._exit(130)
