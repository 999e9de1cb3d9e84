"""The drills, in their short form; `make drills` runs them in full."""

import pytest

from drills.__main__ import DRILLS, rows_of
from ripple_lab.results import read_csv, results_folder


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_does_no_harm(name, capsys):
    rows = rows_of(name, short=True)
    if not rows:
        pytest.skip(capsys.readouterr().out)
    assert [row for row in rows if row["held"] < row["trials"]] == [], capsys.readouterr().out


def test_every_drill_of_the_page_is_one_of_ours_and_held():
    (path,) = results_folder().glob("drills-*.csv")
    rows = read_csv(path)
    assert {row["drill"] for row in rows} <= DRILLS.keys()
    assert all(row["held"] == row["trials"] for row in rows)
