"""Drills: what the lab must survive, done to it for real. `make drills` runs them all.

A drill is a function in any module of this folder, with the decorator `drill`. It takes an empty
folder and whether to be short, and yields a pair for each trial: what was done, and what went
wrong, "" if nothing did. Its short form is a test of the suite, its full form a part of the page
Reliability. `python -m drills --list` names them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Trial = tuple[str, str]
Run = Callable[[Path, bool], Iterator[Trial]]


@dataclass(frozen=True)
class Drill:
    """A drill, and what it shows where nothing goes wrong."""

    run: Run
    shows: str


DRILLS: dict[str, Drill] = {}


def drill(name: str, shows: str) -> Callable[[Run], Run]:
    """Registers a drill."""

    def register(run: Run) -> Run:
        DRILLS[name] = Drill(run, shows)
        return run

    return register
