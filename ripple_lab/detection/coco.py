"""COCO and data sets in its format: a file of annotations and a folder of images."""

import warnings
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import Dataset

from ripple_lab.data.images import DataError
from ripple_lab.data.pictures import check_file, in_colour
from ripple_lab.detection.annotations import Annotations, read_annotations
from ripple_lab.detection.items import make_target
from ripple_lab.detection.matching import Target

TRAIN_NAMES = ("train2017", "train")
EVALUATION_NAMES = ("val2017", "val", "valid", "test")
ANNOTATION_FILES = (
    "annotations/instances_{split}.json",
    "annotations/{split}.json",
    "{split}/_annotations.coco.json",
    "{split}.json",
)
IMAGE_FOLDERS = ("{split}", "images/{split}", "images", ".")
# The folder of images is the one that has any of the first 100; missing ones are skipped later.
SOME = 100
DOWNLOAD = (
    "COCO 2017 is train2017.zip, val2017.zip and annotations_trainval2017.zip of "
    "https://cocodataset.org/#download, unpacked into one folder; pass it as --data.root"
)


class CocoPictures(Dataset[tuple[Image.Image, Target]]):
    """Images of a folder and their objects.

    Args:
        annotations: What is in the images.
        folder: Where they are.
    """

    def __init__(self, annotations: Annotations, folder: Path):
        self.annotations, self.folder = annotations, folder

    @property
    def classes(self) -> tuple[str, ...]:
        return self.annotations.classes

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, index: int) -> tuple[Image.Image, Target]:
        height, width = self.annotations.sizes[index].tolist()
        path = self.filename(index)
        check_file(path)
        with Image.open(path) as file:
            # Boxes of COCO count pixels as they are stored; other sets turn their pictures upright.
            image = in_colour(file, upright=file.size != (width, height))
        if image.size != (width, height):
            raise ValueError(
                f"it has {image.height}×{image.width} pixels, its annotations say {height}×{width}"
            )
        boxes, labels = self.annotations.objects(index)
        number = int(self.annotations.image_ids[index])
        return image, make_target(boxes, labels, number, (height, width))

    def filename(self, index: int) -> str:
        return str(self.folder / str(self.annotations.names[index]))

    def ground_truth(self) -> dict[str, Any]:
        """COCO's form of all objects, for an evaluator."""
        return self.annotations.ground_truth()


def open_coco(root: str, train: bool) -> CocoPictures:
    """The images of one split.

    Args:
        root: A folder as COCO's, `annotations/instances_train2017.json` and `train2017/`; "train"
            in place of "train2017", `images/train/` and `train/_annotations.coco.json` do as well.
        train: The split for training; else that for evaluation.

    Raises:
        DataError: Files are missing or damaged.
    """
    folder = Path(root).expanduser()
    path, split = _find_annotations(folder, TRAIN_NAMES if train else EVALUATION_NAMES)
    read = read_annotations(path)
    places = [folder / name.format(split=split) for name in IMAGE_FOLDERS]
    pictures = CocoPictures(read, _find_images(places, read.names[:SOME].tolist(), path))
    if read.dropped and train:
        warnings.warn(
            f"{read.dropped} of the {len(read.boxes)} boxes in {path} have no area inside their "
            "image and are left out",
            stacklevel=2,
        )
    return pictures


def _find_annotations(folder: Path, splits: tuple[str, ...]) -> tuple[Path, str]:
    """The file of annotations, and the name of its split."""
    names = {file.format(split=split): split for split in splits for file in ANNOTATION_FILES}
    for name, split in names.items():
        if (folder / name).is_file():
            return folder / name, split
    raise DataError(
        f"annotations were looked for in {folder} ({', '.join(names)}) and are not there. "
        f"{DOWNLOAD}"
    )


def _find_images(places: list[Path], names: list[str], annotations: Path) -> Path:
    """The first folder that has any of the named images."""
    for place in places:
        if any((place / name).is_file() for name in names):
            return place
    raise DataError(
        f"images of {annotations}, such as {names[0]}, were looked for in "
        f"{', '.join(map(str, places))} and are not there. {DOWNLOAD}"
    )
