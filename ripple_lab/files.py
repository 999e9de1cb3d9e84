"""Files that are written whole or not at all, and read with one clear line about what is wrong."""

import csv
import errno
import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DiskFullError(OSError):
    """A file for which there was no space: which, and what to do."""


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Says of a full disk what could not be written: the file that is known, else the path."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            f"{error.filename or path} cannot be written: {error.strerror}. Free some space on "
            "that disk, or write to another (--output); what was complete before is unharmed, and "
            "a training run goes on from it with --resume"
        ) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name to write a file under; once it is written, it is renamed, else removed."""
    partial = path.with_name(f".{path.name}.part")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(partial)):
            error.filename = str(path)
        with naming_full_disk(path):
            raise
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")


def write_csv(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Rows as CSV; the columns are all names that occur, in the order in which they do."""
    rows = list(rows)
    text = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_text(path, text.getvalue())


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: It is not JSON, not UTF-8, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
