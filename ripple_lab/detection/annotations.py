"""The objects of a COCO-format file, checked and kept as arrays."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ripple_lab.data.images import DataError
from ripple_lab.text import LONGEST, plain

LARGEST = 2**53  # evaluators keep all numbers, even ids, as float64
LONGEST_PATH = 255  # bytes; file systems take no longer names
SHOWN = 60  # characters of an entry that a refusal shows


@dataclass(frozen=True)
class Annotations:
    """Images and objects: few arrays, which worker processes share without copying them.

    Attributes:
        classes: The name of each label.
        category_ids: The file's number of each label; these may have gaps.
        image_ids: The file's number of each image, int64 (I,).
        names: The file of each image, str (I,).
        sizes: Height and width of each image in pixels, int64 (I, 2).
        first: The objects of image i are those from first[i] up to first[i + 1], int64 (I + 1,).
        boxes: Left, top, width and height in pixels as in the file, float64 (N, 4).
        labels: In 0 … C − 1, int64 (N,).
        areas: Of the objects in pixels, float64 (N,).
        crowd: Whether it is many objects in one box, bool (N,).
    """

    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    image_ids: NDArray[np.int64]
    names: NDArray[np.str_]
    sizes: NDArray[np.int64]
    first: NDArray[np.int64]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    areas: NDArray[np.float64]
    crowd: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.image_ids)

    @property
    def dropped(self) -> int:
        """Objects without area inside their image, crowds aside. These are not learned."""
        sizes = np.repeat(self.sizes, np.diff(self.first), axis=0)  # (N, 2)
        return int((~_has_area(_clipped_corners(self.boxes, sizes)) & ~self.crowd).sum())

    def objects(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The objects to learn in an image: no crowds, and nothing outside the image.

        Returns:
            Left, top, right and bottom in pixels, inside the image, (n, 4), and labels (n,).
        """
        own = slice(self.first[index], self.first[index + 1])
        corners = _clipped_corners(self.boxes[own], self.sizes[index])
        keep = _has_area(corners) & ~self.crowd[own]
        return corners[keep], self.labels[own][keep]

    def ground_truth(self) -> dict[str, Any]:
        """COCO's form, for an evaluator: boxes as in the file, crowds included."""
        owners = np.repeat(self.image_ids, np.diff(self.first)).tolist()
        columns = (self.labels, self.boxes, self.areas, self.crowd)
        rows = zip(owners, *(column.tolist() for column in columns), strict=True)
        return {
            "images": [
                {"id": number, "file_name": name, "height": height, "width": width}
                for number, name, (height, width) in zip(
                    self.image_ids.tolist(), self.names.tolist(), self.sizes.tolist(), strict=True
                )
            ],
            "annotations": [
                {
                    "id": number,
                    "image_id": image,
                    "category_id": self.category_ids[label],
                    "bbox": box,
                    "area": area,
                    "iscrowd": int(crowd),
                }
                for number, (image, label, box, area, crowd) in enumerate(rows, start=1)
            ],
            "categories": [
                {"id": number, "name": name}
                for number, name in zip(self.category_ids, self.classes, strict=True)
            ],
        }


def read_annotations(path: Path) -> Annotations:
    """Reads a COCO-format file; labels are in the order of the file's category numbers.

    Raises:
        DataError: The file cannot be read, or an entry says something impossible.
    """
    try:
        return _parse(path, _read_json(path))
    except RecursionError:
        _refuse(path, "its lists or objects are nested too deeply")


def _parse(path: Path, content: dict[str, list[dict[str, Any]]]) -> Annotations:
    categories = {_whole(path, "category", c, "id"): c for c in content["categories"]}
    images = {_whole(path, "image", i, "id"): i for i in content["images"]}
    for kind, by_id in (("categories", categories), ("images", images)):
        if len(by_id) != len(content[kind]):
            _refuse(path, f"several of its {kind} have the same id")
        if not by_id:
            _refuse(path, f"it has no {kind}")
    label_of = {number: label for label, number in enumerate(sorted(categories))}
    place_of = {number: place for place, number in enumerate(images)}
    rows = [_row(path, entry, place_of, label_of) for entry in content["annotations"]]
    rows.sort(key=lambda row: row[0])
    owners, labels, boxes, areas, crowd = zip(*rows, strict=True) if rows else ((),) * 5
    counts = np.bincount(np.array(owners, np.int64), minlength=len(images))
    return Annotations(
        classes=tuple(_class_name(path, n, categories[n]) for n in sorted(categories)),
        category_ids=tuple(sorted(categories)),
        image_ids=np.array(list(images), np.int64),
        names=np.array([_file_name(path, image) for image in images.values()]),
        sizes=np.array(
            [
                [_whole(path, "image", image, side, least=1) for side in ("height", "width")]
                for image in images.values()
            ],
            np.int64,
        ),
        first=np.concatenate([[0], counts.cumsum()]).astype(np.int64),
        boxes=np.array(boxes, np.float64).reshape(-1, 4),
        labels=np.array(labels, np.int64),
        areas=np.array(areas, np.float64),
        crowd=np.array(crowd, np.bool_),
    )


def _read_json(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the annotations {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not JSON, or not even text
        _refuse(path, f"it is not JSON, or cut short ({error})")
    names = ("images", "annotations", "categories")
    lists = isinstance(content, dict) and all(isinstance(content.get(n), list) for n in names)
    if not lists or not all(isinstance(entry, dict) for n in names for entry in content[n]):
        _refuse(path, f"it must be an object with lists of {', '.join(names)}")
    return content


def _row(
    path: Path, entry: dict[str, Any], place_of: dict[int, int], label_of: dict[int, int]
) -> tuple[int, int, list[float], float, bool]:
    """Image, label, box, area, crowd of an annotation."""
    name = f"annotation {plain(str(entry.get('id', 'without id')), SHOWN)}"
    for key, numbers in (("image_id", place_of), ("category_id", label_of)):
        if not isinstance(entry.get(key), int) or entry[key] not in numbers:
            _refuse(path, f"{name} has {key} {_shown(entry.get(key))}, which is not in the file")
    box = entry.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        _refuse(
            path, f"{name} has bbox {_shown(box)}; it must be [left, top, width, height] in pixels"
        )
    area = entry.get("area", box[2] * box[3])
    if not _is_number(area):
        _refuse(path, f"{name} has area {_shown(area)}; it must be a number")
    crowd = entry.get("iscrowd", 0)
    if not isinstance(crowd, int) or crowd not in (0, 1):  # "0" would count as a crowd
        _refuse(path, f"{name} has iscrowd {_shown(crowd)}; it must be 0 or 1")
    return place_of[entry["image_id"]], label_of[entry["category_id"]], box, area, bool(crowd)


def _clipped_corners(boxes: NDArray[Any], sizes: NDArray[Any]) -> NDArray[np.float64]:
    """Left, top, width, height → left, top, right, bottom, inside images of (height, width)."""
    ends = np.concatenate([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], axis=-1)
    return np.clip(ends, 0, sizes[..., [1, 0, 1, 0]])


def _has_area(corners: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((corners[..., 2:] > corners[..., :2]).all(-1))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST  # which NaN is not


def _whole(path: Path, kind: str, entry: dict[str, Any], key: str, least: int = 0) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or not least <= value <= LARGEST:
        name = entry.get("name") or entry.get("file_name") or entry.get("id")
        _refuse(
            path,
            f"{kind} {plain(str(name), SHOWN)} has {key} {_shown(value)}; it must be a whole "
            f"number from {least} to 2⁵³",
        )
    return value


def _class_name(path: Path, number: int, entry: dict[str, Any]) -> str:
    name = str(entry.get("name", f"category {number}"))
    if len(name) > LONGEST:
        _refuse(path, f"category {number} has a name of {len(name):,} characters, not {LONGEST}")
    return name


def _file_name(path: Path, entry: dict[str, Any]) -> str:
    """The name of an image, which leads to a place below the folder of images."""
    name: Any = entry.get("file_name")
    size = len(name.encode(errors="surrogatepass")) if isinstance(name, str) else 0
    if not 0 < size <= LONGEST_PATH:
        _refuse(
            path,
            f"image {entry['id']} has file_name {_shown(name)}; it must be a name of 1 to "
            f"{LONGEST_PATH} bytes",
        )
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        _refuse(
            path, f"image {entry['id']} has file_name {_shown(name)}, outside the folder of images"
        )
    return str(name)


def _shown(value: Any) -> str:
    return plain(repr(value), SHOWN)


def _refuse(path: Path, why: str) -> NoReturn:
    raise DataError(
        f"the annotations {path} are damaged or not in COCO's format: {why}; "
        "download or export them again"
    )
