"""Images of class folders, tars or the Hub: decoded one by one; damaged ones are skipped."""

import importlib.util
import os
import pickle
import struct
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from timm.data import create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.utils.misc import natural_key
from torch.utils.data import Dataset

from ripple_lab.data.images import DataError
from ripple_lab.data.pictures import in_colour, open_picture

TRAIN_NAMES = ("train", "training")
EVALUATION_NAMES = ("val", "validation", "valid", "test")

# What timm, torchvision, datasets and tarfile raise; timm pickles the contents of a big tar.
CANNOT_OPEN: tuple[type[Exception], ...] = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    EOFError,
    tarfile.TarError,
    pickle.UnpicklingError,
)
# What Pillow raises, and the file below it.
CANNOT_DECODE: tuple[type[Exception], ...] = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    struct.error,
    tarfile.TarError,
    Image.DecompressionBombError,
)

# How many damaged images are named in a warning; further ones are only counted.
NAMED = 10
# This many undecodable images in a row are no accident.
IN_A_ROW = 100


class Pictures(Protocol):
    """A data set whose items are a picture and its label."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


class ReaderPictures(Dataset[tuple[Image.Image, int]]):
    """The images of one of timm's readers. Unlike timm's data set, it never replaces an image.

    Args:
        reader: Index → open file and label.
        classes: The name of each label.
        labels: The reader's label → ours.
    """

    def __init__(self, reader: Any, classes: tuple[str, ...], labels: dict[int, int]):
        self.reader, self.classes, self.labels = reader, classes, labels

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        if isinstance(self.reader, ReaderImageFolder):
            path, label = self.reader.samples[index]
            image = open_picture(path)
        else:
            file, label = self.reader[index]
            with file:
                image = open_picture(file)
        return image, self.labels.get(int(label), int(label))

    def filename(self, index: int) -> str:
        return str(self.reader.filename(index, absolute=True))


class TorchvisionPictures(Dataset[tuple[Image.Image, int]]):
    """One of torchvision's data sets, in RGB."""

    def __init__(self, data: Any, classes: tuple[str, ...]):
        self.data, self.classes = data, classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        image, label = self.data[index]
        return in_colour(image), int(label)

    def filename(self, index: int) -> str:
        samples = getattr(self.data, "samples", None)
        return str(samples[index][0]) if samples else f"image {index}"


def open_folder(source: str, root: str, train: bool, download: bool) -> Pictures:
    """The images of one split, by timm.

    Args:
        source: "" for class folders, `root/train/<class>/<image>.jpg` and `root/val/…`, or tars of
            them, `root/train.tar` and `root/val.tar`; "hfds/<name>" for a data set of the Hub, kept
            in `root`; "torch/<name>" for one of torchvision's, in `root`.
        root: The folder that holds them.
        train: The split "train"; else "val", "validation", "valid" or "test", whichever there is.
        download: Fetch what is missing, for "torch/…"; the Hub's data sets always are.

    Returns:
        A data set of (picture, label); folders have their labels in natural order of the names.

    Raises:
        DataError: Where images are missing or cannot be read.
    """
    folder = Path(root).expanduser()
    if source in ("", "torch/folder", "torch/image_folder"):
        return _open_class_folders(folder, train)
    if source.startswith("hfds/"):
        return _open_hub(source, folder, train)
    if source.startswith("torch/"):
        return _open_torchvision(source, folder, train, download)
    raise ValueError(
        'source must be "", "hfds/<name>" or "torch/<name>": a stream, as "wds/…" or "tfds/…" is, '
        f"has no images that can be asked for one by one; got {source=}"
    )


def check_same_classes(train: Pictures, evaluation: Pictures) -> None:
    """Refuses two splits in which a label would not mean the same class."""
    if train.classes == evaluation.classes:
        return
    only_train = sorted(set(train.classes) - set(evaluation.classes))
    only_evaluation = sorted(set(evaluation.classes) - set(train.classes))
    raise DataError(
        "the training and the evaluation images must have the same classes; "
        f"{len(only_train)} are only in training ({_some(only_train)}), "
        f"{len(only_evaluation)} only in evaluation ({_some(only_evaluation)}): "
        "see that no class folder is missing, empty or misspelt"
    )


class SkipDamaged(Dataset[tuple[Any, int]]):
    """A data set that skips damaged images, counts them and warns about them.

    In training the next image takes the place of a damaged one. In evaluation a black picture
    does, with the label −1, so batches keep their shape: losses and metrics must ignore that label.
    Only reading and decoding may fail; an error of the transform is raised as it is.

    Args:
        dataset: Items are a picture and its label.
        transform: Picture → what the network takes.
        train: Whether this is training.
    """

    def __init__(self, dataset: Pictures, transform: Callable[[Image.Image], Any], train: bool):
        self.dataset, self.transform, self.train = dataset, transform, train
        self._is_damaged = torch.zeros(len(dataset), dtype=torch.bool).share_memory_()
        self._in_a_row = 0

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def damaged(self) -> int:
        """How many different images could not be decoded so far, in this and worker processes."""
        return int(self._is_damaged.sum())

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self._read(index)
        while item is None and self.train:
            index = (index + 1) % len(self)
            item = self._read(index)
        image, label = item or (Image.new("RGB", (256, 256)), -1)
        return self.transform(image), label

    def _read(self, index: int) -> tuple[Image.Image, int] | None:
        try:
            item = self.dataset[index]
        except CANNOT_DECODE as error:
            self._in_a_row += 1
            self._note(index, error)
            if self._in_a_row >= min(IN_A_ROW, len(self)):
                raise DataError(
                    f"{self._in_a_row} images in a row could not be decoded, the last of them "
                    f"{self._name(index)} ({error}): see that the folder can still be read"
                ) from error
            return None
        self._in_a_row = 0
        return item

    def _note(self, index: int, error: Exception) -> None:
        if self._is_damaged[index]:
            return
        self._is_damaged[index] = True
        if self.damaged <= NAMED:
            fate = "the next image takes its place" if self.train else "it is left out"
            more = "; further damaged images are only counted" if self.damaged == NAMED else ""
            warnings.warn(
                f"{self._name(index)} cannot be decoded, {fate} ({error}){more}", stacklevel=4
            )

    def _name(self, index: int) -> str:
        filename = getattr(self.dataset, "filename", None)
        return filename(index) if filename else f"image {index}"


def _open_class_folders(root: Path, train: bool) -> ReaderPictures:
    names = TRAIN_NAMES if train else EVALUATION_NAMES
    layout = f"{root / names[0]}/<class>/<image>.jpg, or the same in {root / names[0]}.tar"
    places = [root / name for split in names for name in (split, f"{split}.tar")]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise DataError(
            f"{'training' if train else 'evaluation'} images were looked for in {root} "
            f"({', '.join(place.name for place in places)}) and are not there: put them into "
            f"{layout}, or name another folder, --data.root"
        )
    _refuse_loops(place)
    # A tar stays closed between images: worker processes would share its position.
    options: dict[str, Any] = {"cache_tarfiles": False} if place.is_file() else {}
    try:
        reader = create_dataset("", str(place), search_split=False, **options).reader
    except CANNOT_OPEN as error:
        raise DataError(
            f"no images were found in {place} ({_first_line(error)}): what is expected is {layout}"
        ) from None
    found: dict[str, int] = getattr(reader, "class_to_idx", None) or reader.class_name_to_idx
    if {"", "."} & found.keys():
        raise DataError(
            f"{place} has images that are in no class folder, such as {reader.filename(0)}: "
            f"what is expected is {layout}"
        )
    # timm does not define the order of names that differ only in case or in leading zeros.
    classes = tuple(sorted(found, key=lambda name: (natural_key(name), name)))
    return ReaderPictures(reader, classes, {found[name]: i for i, name in enumerate(classes)})


def _refuse_loops(folder: Path) -> None:
    """Refuses a folder with a link to a folder it lies in: timm would go round and round."""
    for place, names, _ in os.walk(folder, followlinks=True):
        for link in (Path(place, name) for name in names):
            if link.is_symlink() and link.resolve() in (above.resolve() for above in link.parents):
                raise DataError(
                    f"{link} is a link to {link.resolve()}, in which it lies: remove the link"
                )


def _open_hub(source: str, root: Path, train: bool) -> ReaderPictures:
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{source} needs Hugging Face's datasets: pip install datasets")
    failure = ""
    for split in ("train",) if train else ("validation", "val", "valid", "test"):
        try:
            reader = create_dataset(source, str(root), split=split).reader
        except CANNOT_OPEN as error:
            failure = _first_line(error)
            if "split" in failure:  # there is none of this name
                continue
            break
        found: dict[str, int] = reader.class_to_idx
        if not found:
            raise DataError(f'{source} has no feature "label" with names of classes')
        return ReaderPictures(reader, tuple(sorted(found, key=lambda name: found[name])), {})
    raise DataError(
        f"{source} could not be opened from the Hub, to be kept in {root} ({failure}): "
        "see that the name is right, that the network can be reached and, where its terms must be "
        "accepted, that you are logged in"
    )


def _open_torchvision(source: str, root: Path, train: bool, download: bool) -> TorchvisionPictures:
    split = "train" if train else "validation"
    try:
        data = create_dataset(source, str(root), split=split, download=download)
    except CANNOT_OPEN as error:
        raise DataError(
            f"{source} could not be opened in {root} ({_first_line(error)}): see that the name and "
            "the folder are right, or pass --data.download"
        ) from None
    names = getattr(data, "classes", None) or getattr(data, "all_categories", None) or ()
    # An ImageNet class has several names.
    classes = tuple(name if isinstance(name, str) else ", ".join(name) for name in names)
    return TorchvisionPictures(data, classes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3] + ["…"] * (len(names) > 3)) or "none"
