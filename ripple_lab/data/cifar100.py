"""CIFAR-100, from its official binary archive; nothing is unpickled."""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import wrap_file
from torch import Tensor

from ripple_lab.data.images import DataError, Images

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
MD5 = "03b5dce01913d631647c71ecec9e9cb8"
FOLDER = "cifar-100-binary"
ARCHIVE = f"{FOLDER}.tar.gz"
NAMES = "fine_label_names.txt"
RECORDS = {"train": 50_000, "test": 10_000}
RECORD_BYTES = 2 + 3 * 32 * 32  # coarse label, fine label; red, green, blue, row by row
NUM_CLASSES = 100
REMEDY = f"remove it and unpack {ARCHIVE} again"


def load_cifar100(root: str | Path, train: bool, download: bool = False) -> Images:
    """CIFAR-100's training or test images, with fine labels.

    Args:
        root: The folder that holds `cifar-100-binary/`, or `cifar-100-binary.tar.gz`, which is
            unpacked there; or the folder of the binary files itself.
        train: The 50,000 training images; else the 10,000 test images.
        download: Fetch the archive into `root` if nothing is there.

    Returns:
        The images, in the order of the file.

    Raises:
        DataError: Files are missing or damaged.
    """
    split = "train" if train else "test"
    folder = find_folder(Path(root).expanduser(), split, download)
    images, labels = read_records(folder / f"{split}.bin", RECORDS[split])
    return Images(images, labels, read_names(folder / NAMES))


def find_folder(root: Path, split: str, download: bool) -> Path:
    """The folder of the binary files, after fetching and unpacking them if needed."""
    unpacked, archive = root / FOLDER, root / ARCHIVE
    for folder in (root, unpacked):
        if (folder / f"{split}.bin").is_file():
            return folder
    if unpacked.exists():
        raise DataError(f"{unpacked} has no {split}.bin: {REMEDY}")
    if not archive.is_file():
        if not download:
            raise DataError(
                f"CIFAR-100's binary files were looked for in {root} ({unpacked / split}.bin) and "
                f"are not there: unpack {ARCHIVE} there, or pass --data.download"
            )
        download_archive(archive)
    unpack_archive(archive)
    return unpacked


def download_archive(archive: Path) -> None:
    """Fetches the archive; it gets its name once it is complete."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=archive.parent) as temporary:
        partial = Path(temporary) / archive.name
        try:
            with urllib.request.urlopen(URL, timeout=60) as response, partial.open("wb") as file:
                size = int(response.headers.get("Content-Length") or 0)
                console = Console(stderr=True)
                with wrap_file(response, size, description=ARCHIVE, console=console) as body:
                    shutil.copyfileobj(body, file)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(
                f"{URL} could not be fetched ({error}): try again, or put {ARCHIVE} into "
                f"{archive.parent} yourself"
            ) from None
        check_md5(partial, f"what came from {URL}", "try again")
        partial.replace(archive)


def unpack_archive(archive: Path) -> None:
    """Unpacks the archive beside itself: completely or, if interrupted, not at all."""
    check_md5(archive, str(archive), "remove it and fetch it again, --data.download")
    folder = archive.parent / FOLDER
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=archive.parent) as temporary:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(temporary, filter="data")
            os.rename(Path(temporary) / FOLDER, folder)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            if folder.exists():  # another process was faster
                return
            raise DataError(
                f"{archive} cannot be unpacked ({error}): see that there is space, or remove it "
                "and fetch it again, --data.download"
            ) from None


def check_md5(path: Path, what: str, remedy: str) -> None:
    """Refuses a file that is not the official archive."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != MD5:
        raise DataError(f"{what} is not whole: its md5 is {found}, not {MD5}: {remedy}")


def read_records(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """The images and fine labels of a binary file.

    Args:
        path: The file.
        count: How many records it must have.

    Returns:
        uint8 (L, 3, 32, 32) and int64 (L,).
    """
    size, expected = path.stat().st_size, count * RECORD_BYTES
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes; {count:,} records of {RECORD_BYTES:,} are {expected:,}: "
            f"{REMEDY}"
        )
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8)).view(count, RECORD_BYTES)
    labels = records[:, 1].long()
    if labels.max() >= NUM_CLASSES:
        raise DataError(
            f"{path} has a label {labels.max()}; they go to {NUM_CLASSES - 1}: {REMEDY}"
        )
    return records[:, 2:].reshape(count, 3, 32, 32).contiguous(), labels


def read_names(path: Path) -> tuple[str, ...]:
    """The names of the fine labels, one on each line."""
    if not path.is_file():
        raise DataError(f"the names of CIFAR-100's classes are missing, {path}: {REMEDY}")
    names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    if len(names) != NUM_CLASSES:
        raise DataError(f"{path} has {len(names)} names for {NUM_CLASSES} classes: {REMEDY}")
    return names
