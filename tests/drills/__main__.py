"""Runs drills, and writes a line for each case: python -m drills [NAME...]"""

import argparse
import importlib
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import drills
from ripple_lab import machine
from ripple_lab.files import write_csv
from ripple_lab.results import read_csv, results_folder

for module in pkgutil.iter_modules(drills.__path__):
    if module.name != "__main__":
        importlib.import_module(f"drills.{module.name}")
DRILLS = drills.DRILLS


def main():
    parser = argparse.ArgumentParser(prog="python -m drills", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all unless given")
    parser.add_argument("--list", action="store_true", help="name them, and what they show")
    parser.add_argument("--short", action="store_true", help="a few trials each; no results file")
    parser.add_argument("--output", type=Path, help="the results file")
    given = parser.parse_args()
    if given.list:
        sys.exit("\n".join(f"{name}: {it.shows}" for name, it in DRILLS.items()))
    unknown = set(given.names) - set(DRILLS)
    if unknown:
        parser.error(f"drills are {', '.join(DRILLS)}; got {', '.join(unknown)}")
    hardware = machine.slug(machine.hardware(torch.device("cpu")))
    path = given.output or results_folder() / f"drills-{hardware}.csv"
    failed = 0
    for name in given.names or DRILLS:
        rows = rows_of(name, given.short)
        failed += sum(row["trials"] - row["held"] for row in rows)
        if not given.short:
            before = read_csv(path) if path.exists() else []
            places = [place for place, row in enumerate(before) if row["drill"] == name]
            place = min(places, default=len(before))
            others = [row for row in before if row["drill"] != name]
            write_csv([*others[:place], *rows, *others[place:]], path)
    sys.exit(f"{failed} trials went wrong" if failed else 0)


def rows_of(name, short):
    """Runs a drill in a folder of its own: how many trials there were of each case, and held."""
    trials, held = Counter(), Counter()
    folder, begin = Path(tempfile.mkdtemp(prefix="drill-")), time.monotonic()
    for case, wrong in DRILLS[name].run(folder, short):
        trials[case] += 1
        held[case] += not wrong
        if wrong:
            print(f"{name}: {case}: {wrong}", flush=True)
    shutil.rmtree(folder)
    print(f"{name}: {held.total()} of {trials.total()}", flush=True)
    seconds = round(time.monotonic() - begin)
    return [
        {"drill": name, "case": case, "trials": count, "held": held[case]}
        | {"shows": DRILLS[name].shows, "seconds_of_drill": seconds}
        for case, count in trials.items()
    ]


if __name__ == "__main__":
    main()
