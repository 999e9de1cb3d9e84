"""Data and evaluation of detectors: boxes are where the objects are, from the file to the score."""

import copy
import importlib.util
import json
import math
import pickle
import sys
import warnings
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

pytest.importorskip("torchvision")
pytest.importorskip("timm")

from PIL import Image, ImageDraw
from torchvision.ops import box_convert

from processes import in_two_ranks
from ripple_lab.data.images import DataError
from ripple_lab.data.loaders import SeededItems
from ripple_lab.detection.coco import open_coco
from ripple_lab.detection.drawing import draw_objects
from ripple_lab.detection.evaluation import CocoEvaluation, find_objects
from ripple_lab.detection.items import DAMAGED, DetectionItems, collate, make_target
from ripple_lab.detection.shapes import BACKGROUND, Shapes
from ripple_lab.detection.transforms import (
    MEAN,
    STD,
    DetectionAugmentation,
    evaluation_transform,
    train_transform,
)

SMALL = DetectionAugmentation(
    scales=(60, 80), max_size=120, crop_scales=(50, 70), crop_sizes=(30, 60)
)


def annotation(number, image_id, category_id, bbox, **more):
    return {"id": number, "image_id": image_id, "category_id": category_id, "bbox": bbox} | more


# Image 7 has an object, a crowd, one that hangs over the edge and two without area inside;
# image 3 has none; category ids have gaps, and are not in order.
CONTENT = {
    "images": [
        {"id": 7, "file_name": "seven.png", "width": 40, "height": 30},
        {"id": 3, "file_name": "three.png", "width": 20, "height": 50},
        {"id": 12, "file_name": "twelve.png", "width": 30, "height": 30},
    ],
    "annotations": [
        annotation(1, 12, 90, [1, 2, 3, 4]),
        annotation(2, 7, 5, [10, 5, 20, 8], area=77.5, iscrowd=0),
        annotation(3, 7, 18, [0, 0, 40, 30], iscrowd=1),
        annotation(4, 7, 18, [-5, 20, 15, 30]),
        annotation(5, 7, 5, [40, 3, 10, 10]),
        annotation(6, 7, 5, [4, 4, 0, 10]),
    ],
    "categories": [
        {"id": 90, "name": "brush"},
        {"id": 5, "name": "plane"},
        {"id": 18, "name": "dog"},
    ],
}


def write_coco(root, content=CONTENT, split="train2017", images=None):
    """A folder as COCO's, with images in one colour each."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (root / f"annotations/instances_{split}.json").write_text(text)
    folder = root / (images or split)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in CONTENT["images"]:
        image = Image.new("RGB", (entry["width"], entry["height"]), (entry["id"], 0, 0))
        image.save(folder / entry["file_name"])
    return root


def changed(**parts):
    return copy.deepcopy(CONTENT) | parts


@pytest.fixture
def coco(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_coco(str(write_coco(tmp_path)), train=True)


def test_categories_with_gaps_become_labels_and_come_back(coco):
    assert coco.classes == ("plane", "dog", "brush")
    _, target = coco[2]
    assert target["labels"].tolist() == [2]
    by_id = {a["id"]: a["category_id"] for a in coco.ground_truth()["annotations"]}
    assert sorted(by_id.values()) == sorted(a["category_id"] for a in CONTENT["annotations"])


def test_only_objects_inside_the_image_are_targets(coco):
    image, target = coco[0]
    assert image.size == (40, 30) and target["size"] == (30, 40) and target["image_id"] == 7
    assert target["labels"].tolist() == [0, 1]
    assert target["boxes"].tolist() == [[10, 5, 30, 13], [0, 20, 10, 30]]
    assert target["boxes"].canvas_size == (30, 40)


def test_boxes_without_area_are_counted_and_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="2 of the 6 boxes in .*instances_train2017.json") as found:
        data = open_coco(str(write_coco(tmp_path)), train=True)
    assert len(found) == 1
    assert data.annotations.dropped == 2


def test_empty_images_are_kept(coco):
    assert len(coco) == 3
    image, target = coco[1]
    assert image.getpixel((0, 0)) == (3, 0, 0)
    assert target["labels"].shape == (0,) and target["boxes"].shape == (0, 4)


def test_ground_truth_is_what_the_file_says_crowds_included(coco):
    truth = coco.ground_truth()
    assert [image["id"] for image in truth["images"]] == [7, 3, 12]
    assert truth["images"][0] == CONTENT["images"][0]
    keys = ("image_id", "category_id", "bbox", "iscrowd")
    rows = [tuple(a[key] for key in keys) for a in truth["annotations"]]
    expected = [(a | {"iscrowd": a.get("iscrowd", 0)}) for a in CONTENT["annotations"]]
    expected = [tuple(a[key] for key in keys) for a in expected]
    assert sorted(rows, key=str) == sorted(
        ((*row[:2], [float(x) for x in row[2]], row[3]) for row in expected), key=str
    )
    areas = {tuple(a["bbox"]): a["area"] for a in truth["annotations"]}
    assert areas[10, 5, 20, 8] == 77.5  # as it is given
    assert areas[1, 2, 3, 4] == 12  # else that of the box
    assert len({a["id"] for a in truth["annotations"]} - {0}) == 6


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("annotations/instances_val2017.json", "val2017"),
        ("annotations/instances_val.json", "images/val"),
        ("annotations/val.json", "images"),
        ("valid/_annotations.coco.json", "valid"),
    ],
)
def test_layouts_that_people_have_are_found(tmp_path, file, folder):
    write_coco(tmp_path, images=folder)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / "annotations/instances_train2017.json").rename(tmp_path / file)
    data = open_coco(str(tmp_path), train=False)
    assert data[2][0].getpixel((0, 0)) == (12, 0, 0)


def entry_without(kind, key, place=0):
    content = copy.deepcopy(CONTENT)
    del content[kind][place][key]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(CONTENT)[:200], "not JSON, or cut short"),
        ("[]", "lists of images, annotations, categories"),
        (entry_without("annotations", "bbox"), "annotation 1 has bbox None"),
        (changed(annotations=[annotation(4, 7, 5, [1, 2, 3])]), r"annotation 4 has bbox \[1, 2, 3"),
        (changed(annotations=[annotation(4, 7, 5, [1, 2, math.nan, 4])]), "annotation 4 has bbox"),
        (changed(annotations=[annotation(4, 8, 5, [1, 2, 3, 4])]), "4 has image_id 8, which"),
        (changed(annotations=[annotation(4, 7, 6, [1, 2, 3, 4])]), "4 has category_id 6, which"),
        (changed(annotations=[annotation(4, 7, 5, [1, 2, 3, 4], area="big")]), "area 'big'"),
        (changed(annotations=[annotation(4, 7, 5, [1, 2, 3, 10**400])]), "annotation 4 has bbox"),
        (
            changed(annotations=[annotation(4, 7, 5, [1, 2, 3, 4], iscrowd="0")]),
            "4 has iscrowd '0'",
        ),
        (changed(images=[CONTENT["images"][0] | {"id": 2**53 + 1}]), "to 2⁵³"),
        (changed(images=CONTENT["images"] * 2), "several of its images have the same id"),
        (changed(images=[], annotations=[]), "it has no images"),
        (entry_without("images", "height"), "image seven.png has height None"),
        (entry_without("images", "file_name"), "image 7 has file_name None"),
        (entry_without("categories", "id"), "category brush has id None"),
    ],
)
def test_damaged_annotations_are_named_in_one_line(tmp_path, content, message):
    write_coco(tmp_path, content)
    with pytest.raises(DataError, match=message) as error:
        open_coco(str(tmp_path), train=True)
    assert "instances_train2017.json" in str(error.value) and "\n" not in str(error.value)


def test_missing_annotations_are_said_with_the_remedy(tmp_path):
    with pytest.raises(DataError, match="instances_val2017.json.*cocodataset.org") as error:
        open_coco(str(tmp_path), train=False)
    assert str(tmp_path) in str(error.value)


def test_missing_images_are_said_with_the_places(tmp_path):
    write_coco(tmp_path, images="elsewhere")
    with pytest.raises(DataError, match="such as seven.png.*images/train2017.*cocodataset.org"):
        open_coco(str(tmp_path), train=True)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:60])


def resize(path):
    Image.open(path).resize((33, 22)).save(path)


@pytest.mark.filterwarnings("ignore:2 of the 6 boxes")
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut_short, "three.png"),
        (lambda path: path.unlink(), "No such file"),
        (resize, "22×33 pixels, its annotations say 50×20"),
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_damaged_images_are_counted_and_skipped(tmp_path, spoil, why, train):
    write_coco(tmp_path, split="train2017" if train else "val2017")
    spoil(tmp_path / ("train2017" if train else "val2017") / "three.png")
    transform = evaluation_transform(30, 60)
    items = DetectionItems(open_coco(str(tmp_path), train), transform, train)
    with pytest.warns(UserWarning, match=why):
        _, target = items[1]
    assert items.damaged == 1
    assert target["image_id"] == (12 if train else DAMAGED)
    assert len(target["labels"]) == int(train)
    assert items[0][1]["image_id"] == 7


@pytest.mark.filterwarnings("ignore")
def test_worker_processes_survive_damaged_images(tmp_path):
    write_coco(tmp_path, split="val2017")
    cut_short(tmp_path / "val2017/three.png")
    items = DetectionItems(open_coco(str(tmp_path), False), evaluation_transform(30, 60), False)
    loader = DataLoader(items, batch_size=3, num_workers=1, collate_fn=collate)
    [(images, targets)] = list(loader)
    assert [target["image_id"] for target in targets] == [7, DAMAGED, 12]
    assert [tuple(image.shape) for image in images] == [(3, 30, 40), (3, 30, 30), (3, 30, 30)]
    assert items.damaged == 1  # they are counted in shared memory


def test_upright_annotations_of_a_turned_photo_are_understood(tmp_path):
    write_coco(tmp_path, split="val2017")
    turned = Image.new("RGB", (30, 40))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by 90°
    turned.save(tmp_path / "val2017/seven.png", exif=exif)
    assert open_coco(str(tmp_path), train=False)[0][0].size == (40, 30)


def test_annotations_that_go_by_the_stored_pixels_leave_a_tagged_photo_as_it_is(tmp_path):
    write_coco(tmp_path, split="val2017")
    stored = Image.new("RGB", (40, 30))
    exif = stored.getexif()
    exif[0x0112] = 3  # upside down, of the same size
    stored.putpixel((0, 0), (255, 255, 255))
    stored.save(tmp_path / "val2017/seven.png", exif=exif)
    assert open_coco(str(tmp_path), train=False)[0][0].getpixel((0, 0)) == (255, 255, 255)


def test_photos_of_16_bits_are_not_white(tmp_path):
    write_coco(tmp_path, split="val2017")
    Image.new("I;16", (40, 30), 100 * 257).save(tmp_path / "val2017/seven.png")
    image, _ = open_coco(str(tmp_path), train=False)[0]
    assert image.getextrema() == ((100, 100),) * 3


def picture_with_rectangle(seed):
    """A white rectangle on black at a random place, sides not under 12 pixels."""
    rng = np.random.default_rng(seed)
    height, width = rng.integers(60, 120, 2).tolist()
    left, top = int(rng.integers(0, width - 30)), int(rng.integers(0, height - 30))
    right = int(rng.integers(left + 12, width + 1))
    bottom = int(rng.integers(top + 12, height + 1))
    image = Image.new("RGB", (width, height))
    ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), fill="white")
    # Two boxes of one rectangle, and between them one outside: boxes and labels stay together.
    boxes = [[left, top, right, bottom], [-9, 0, -2, 5], [left, top, right, bottom]]
    return image, make_target(boxes, [4, 5, 6], seed, (height, width))


def white_box(image):
    """Left, top, right, bottom of what is white in a normalised image, relative to it."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (MEAN, STD))
    white = (image * std + mean).mean(0) > 0.5
    rows, columns = white.any(1).nonzero(), white.any(0).nonzero()
    if not len(rows):
        return None
    ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    height, width = white.shape
    return torch.tensor(ends) / torch.tensor([width, height, width, height])


@pytest.mark.parametrize("aug", [SMALL, DetectionAugmentation(**vars(SMALL) | {"crop": 1.0})])
def test_boxes_follow_flips_crops_and_resizes(aug):
    transform = train_transform(aug)
    torch.manual_seed(0)
    visible = 0
    for seed in range(60):
        picture, target = picture_with_rectangle(seed)
        image, result = transform(picture, target)
        assert type(image) is torch.Tensor and type(result["boxes"]) is torch.Tensor
        assert image.dtype == torch.float32 and result["boxes"].dtype == torch.float32
        assert min(image.shape[1:]) <= 80 and max(image.shape[1:]) <= 120
        assert result["size"] == target["size"] and result["image_id"] == seed
        if len(result["labels"]) == 0:
            continue
        visible += 1
        assert result["labels"].tolist() == [4, 6]
        found, pixel = white_box(image), 1 / torch.tensor(image.shape)[[2, 1, 2, 1]]
        for box in box_convert(result["boxes"], "cxcywh", "xyxy"):
            assert ((box - found).abs() <= 1.01 * pixel).all()
    assert visible > 30


def test_rectangles_that_are_cut_off_have_no_box():
    transform = train_transform(DetectionAugmentation(**vars(SMALL) | {"crop": 1.0, "flip": 0.0}))
    torch.manual_seed(0)
    lost = 0
    for seed in range(60):
        image, result = transform(*picture_with_rectangle(seed))
        lost += len(result["labels"]) == 0
        if white_box(image) is None:
            assert len(result["labels"]) == 0
    assert lost > 0


def test_flip_is_certain_or_never_as_asked():
    picture, target = picture_with_rectangle(1)
    same, mirrored = (
        train_transform(DetectionAugmentation(flip=flip, scales=(60,), crop=0))(picture, target)
        for flip in (0.0, 1.0)
    )
    torch.testing.assert_close(mirrored[0], same[0].flip(-1))
    torch.testing.assert_close(mirrored[1]["boxes"][:, 0], 1 - same[1]["boxes"][:, 0])
    torch.testing.assert_close(mirrored[1]["boxes"][:, 1:], same[1]["boxes"][:, 1:])


def test_pictures_may_stay_as_they_are():
    picture, target = picture_with_rectangle(1)
    as_it_is = DetectionAugmentation(flip=0, scales=(), crop=0)
    for transform in (train_transform(as_it_is), evaluation_transform(None)):
        image, result = transform(picture, target)
        assert image.shape[1:] == (picture.height, picture.width)
        assert result["labels"].tolist() == [4, 6]  # the box outside is left out


def test_sizes_are_detrs():
    transform, picture = train_transform(DetectionAugmentation(crop=0)), Image.new("RGB", (64, 48))
    torch.manual_seed(0)
    sizes = [transform(picture, make_target([], [], 0, (48, 64)))[0].shape[1] for _ in range(60)]
    assert set(sizes) == set(range(480, 801, 32))
    long = transform(Image.new("RGB", (90, 30)), make_target([], [], 0, (30, 90)))[0]
    assert long.shape[2] == 1333
    image, _ = evaluation_transform()(picture, make_target([], [], 0, (48, 64)))
    assert image.shape == (3, 800, 1066)
    wide, _ = evaluation_transform(64, 64)(
        Image.new("RGB", (90, 30)), make_target([], [], 0, (1, 1))
    )
    assert wide.shape == (3, 21, 64)


def test_images_are_normalised_as_imagenets():
    picture = Image.new("RGB", (40, 40), (255, 0, 128))
    image, _ = evaluation_transform(32, 64)(picture, make_target([], [], 0, (40, 40)))
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (128 / 255 - 0.406) / 0.225]
    torch.testing.assert_close(image.mean((1, 2)), torch.tensor(expected))


def test_augmentation_is_decided_by_the_seed_of_an_item():
    items = SeededItems(DetectionItems(Shapes(4), train_transform(SMALL), train=True))
    image, target = items[2, 11]
    torch.rand(5)
    again, target_again = items[2, 11]
    torch.testing.assert_close(again, image)
    torch.testing.assert_close(target_again["boxes"], target["boxes"])
    others = [items[2, seed][0] for seed in range(4)]
    assert any(o.shape != image.shape or not torch.equal(o, image) for o in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 1.5}, "flip=1.5"),
        ({"scales": (0,)}, "scales must be lengths ≥ 1"),
        ({"crop_scales": ()}, "one or more"),
        ({"max_size": 700}, "max_size=700"),
        ({"crop_sizes": (9, 5)}, r"crop_sizes=\(9, 5\)"),
    ],
)
def test_augmentation_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        DetectionAugmentation(**options)


def test_shapes_are_the_same_for_the_same_seed():
    one, same, other = Shapes(5, seed=3), Shapes(50, seed=3), Shapes(5, seed=4)
    for index in (4, 0):  # in any order
        assert one[index][0].tobytes() == same[index][0].tobytes()
        assert one[index][1]["boxes"].tolist() == same[index][1]["boxes"].tolist()
        assert one[index][0].tobytes() != other[index][0].tobytes()
    assert one[0][0].tobytes() != one[1][0].tobytes()


def test_boxes_of_shapes_are_tight():
    shapes = Shapes(60, noise=0)
    labels, counts, sizes = [], [], set()
    for index in range(len(shapes)):
        image, target = shapes[index]
        pixels = np.asarray(image).astype(int)
        drawn = (np.abs(pixels - BACKGROUND) > 32).all(-1)
        for left, top, right, bottom in target["boxes"].int().tolist():
            inside = drawn[top:bottom, left:right]
            assert inside.shape == (bottom - top, right - left)
            assert inside[0].any() and inside[-1].any()
            assert inside[:, 0].any() and inside[:, -1].any()
            drawn[top:bottom, left:right] = False
        assert not drawn.any()
        labels += target["labels"].tolist()
        counts.append(len(target["labels"]))
        sizes.add(image.size)
    assert set(labels) == {0, 1, 2} and set(counts) == {1, 2, 3, 4}
    assert sizes == {(96, 64), (128, 64), (96, 96), (128, 96)}


def test_noise_is_as_strong_as_asked():
    image, _ = Shapes(3, noise=10)[1]
    clean, _ = Shapes(3, noise=0)[1]
    difference = np.asarray(image).astype(int) - np.asarray(clean)
    assert 7 < difference.std() < 11


def test_items_can_be_sent_to_worker_processes():
    items = DetectionItems(Shapes(4), train_transform(SMALL), train=True)
    again = pickle.loads(bytes(ForkingPickler.dumps(items)))
    torch.testing.assert_close(SeededItems(again)[1, 2][0], SeededItems(items)[1, 2][0])


def test_shapes_come_to_an_end():
    assert len(list(Shapes(2))) == 2


def test_found_objects_are_the_likeliest_pairs_of_query_and_class_in_pixels():
    logits = torch.full((2, 3, 4), -8.0)
    logits[0, 1, 2], logits[0, 1, 3], logits[0, 2, 0] = 2.0, 1.0, 3.0
    boxes = torch.tensor([0.5, 0.25, 0.2, 0.5]).repeat(2, 3, 1)
    boxes[0, 2] = torch.tensor([0.25, 0.5, 0.5, 1.0])
    first, second = find_objects({"logits": logits, "boxes": boxes}, [(100, 200), (40, 40)], top=3)
    assert first["labels"].tolist() == [0, 2, 3]
    torch.testing.assert_close(first["scores"], torch.tensor([3.0, 2.0, 1.0]).sigmoid())
    expected = [[0, 0, 100, 100], [80, 0, 120, 50], [80, 0, 120, 50]]
    torch.testing.assert_close(first["boxes"], torch.tensor(expected).float())
    torch.testing.assert_close(second["boxes"][0], torch.tensor([16.0, 0, 24, 20]))
    everything = find_objects({"logits": logits, "boxes": boxes}, [(1, 1), (1, 1)])
    assert [len(found["scores"]) for found in everything] == [12, 12]
    many = {"logits": torch.randn(1, 200, 4), "boxes": torch.rand(1, 200, 4)}
    assert len(find_objects(many, [(1, 1)])[0]["scores"]) == 300  # as SMCA's are judged


# Squares of each of COCO's three sizes, side by side; three images, the last without objects.
SIDES = {"small": 20, "medium": 60, "large": 150}


def squares():
    boxes = [[0, 0, 20, 20], [50, 0, 110, 60], [150, 0, 300, 150]]
    targets = [make_target(boxes, [0, 1, 2], image, (200, 320)) for image in (0, 1)]
    targets.append(make_target([], [], 2, (200, 320)))
    ids = (2, 7, 9)
    truth = {
        "images": [{"id": image, "height": 200, "width": 320} for image in range(3)],
        "categories": [{"id": number, "name": str(number)} for number in ids],
        "annotations": [],
    }
    for image in (0, 1):
        for label, (left, top, right, bottom) in enumerate(boxes):
            number = len(truth["annotations"]) + 1
            box = [left, top, right - left, bottom - top]
            more = {"area": box[2] * box[3], "iscrowd": 0}
            truth["annotations"].append(annotation(number, image, ids[label], box, **more))
    return truth, targets


def judged(truth, targets, change=lambda boxes, labels: (boxes, labels)):
    """The metrics of predictions that are the targets, changed."""
    evaluation = CocoEvaluation(truth)
    for target in targets:
        boxes, labels = change(target["boxes"].as_subclass(torch.Tensor).clone(), target["labels"])
        logits = torch.full((1, len(labels) + 1, 3), -20.0)
        logits[0, torch.arange(len(labels)), labels] = 4.0
        height, width = target["size"]
        lengths = torch.tensor([width, height, width, height])
        relative = box_convert(boxes, "xyxy", "cxcywh") / lengths
        relative = torch.cat([relative, torch.full((1, 4), 0.5)])[None]
        outputs = {"logits": logits, "boxes": relative}
        evaluation.update(find_objects(outputs, [target["size"]], top=len(labels) + 1), [target])
    return evaluation.compute()


needs_evaluator = pytest.mark.skipif(
    importlib.util.find_spec("faster_coco_eval") is None, reason="needs faster-coco-eval"
)


@needs_evaluator
def test_perfect_predictions_have_ap_1(capfd):
    truth, targets = squares()
    before = copy.deepcopy(truth)
    metrics = judged(truth, targets)
    names = ["ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"]
    assert list(metrics) == names
    assert metrics == pytest.approx(dict.fromkeys(names, 1.0))
    assert truth == before
    out, err = capfd.readouterr()
    assert out == err == ""


@needs_evaluator
@pytest.mark.parametrize("size", SIDES)
def test_shifted_predictions_have_less_and_only_in_their_size(size):
    def shift(boxes, labels):
        wide = (boxes[:, 2] - boxes[:, 0]) == SIDES[size]
        boxes[wide] += torch.tensor([0.2, 0, 0.2, 0]) * SIDES[size]  # overlap 0.8 / 1.2
        return boxes, labels

    metrics = judged(*squares(), shift)
    # Right at thresholds 0.5, 0.55, 0.6 and 0.65 of the ten.
    assert metrics[f"ap_{size}"] == pytest.approx(0.4)
    assert metrics["ap"] == pytest.approx((1 + 1 + 0.4) / 3)
    assert metrics["ap50"] == pytest.approx(1)
    assert metrics["ap75"] == pytest.approx(2 / 3)
    for other in SIDES.keys() - {size}:
        assert metrics[f"ap_{other}"] == pytest.approx(1)


@needs_evaluator
def test_wrong_classes_have_ap_0():
    metrics = judged(*squares(), lambda boxes, labels: (boxes, (labels + 1) % 3))
    assert metrics["ap"] == 0


@needs_evaluator
def test_crowds_are_neither_missed_nor_wrong():
    truth, targets = squares()
    crowd = annotation(99, 0, 7, [0, 100, 100, 100], area=10_000, iscrowd=1)
    truth["annotations"].append(crowd)
    inside = torch.tensor([[10.0, 110, 60, 150]])

    def also_one_of_the_crowd(boxes, labels):
        return torch.cat([inside, boxes]), torch.cat([torch.tensor([1]), labels])

    only_first = targets[:1]
    assert judged(truth, only_first)["ap"] == pytest.approx(1)
    assert judged(truth, only_first, also_one_of_the_crowd)["ap"] == pytest.approx(1)
    truth["annotations"].pop()
    assert judged(truth, only_first, also_one_of_the_crowd)["ap"] < 0.9


@needs_evaluator
def test_sizes_without_objects_have_no_number_and_damaged_images_are_left_out():
    truth, targets = squares()
    truth["annotations"] = [a for a in truth["annotations"] if a["area"] < 10_000]
    # Of image 1 nothing could be decoded: that it has objects does not count.
    targets[1]["image_id"] = DAMAGED
    metrics = judged(truth, targets[:2])
    assert math.isnan(metrics["ap_large"])
    assert metrics["ap"] == pytest.approx(1)


@needs_evaluator
def test_shapes_evaluate_themselves():
    shapes = Shapes(20)
    metrics = judged(shapes.ground_truth(), [shapes[index][1] for index in range(20)])
    assert metrics["ap"] == pytest.approx(1)


def shifted(boxes, labels):
    return boxes + torch.tensor([8.0, 0, 8, 0]), labels


def of_one_rank(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    truth, targets = squares()
    own = targets[rank : rank + 1]
    found = judged(truth, own, shifted) if rank else judged(truth, own)
    dist.destroy_process_group()
    return found


@needs_evaluator
def test_ranks_judge_what_all_of_them_found():
    truth, targets = squares()
    changes = iter([lambda *same: same, shifted])
    expected = judged(truth, targets[:2], lambda *found: next(changes)(*found))
    assert judged(truth, targets[1:2], shifted)["ap"] < expected["ap"] < 0.95
    first, second = in_two_ranks(of_one_rank)
    assert first == second == expected


def test_a_missing_evaluator_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[detection\]'"):
        judged(*squares())


def test_nothing_evaluated_is_said():
    with pytest.raises(ValueError, match="no image was evaluated"):
        CocoEvaluation(squares()[0]).compute()


def test_drawing_shows_likely_objects_and_leaves_the_picture_alone():
    picture = Image.new("RGB", (200, 160))
    found = {
        "boxes": torch.tensor([[40.0, 60, 120, 140], [150, 100, 190, 150], [-20, 80, 500, 90]]),
        "labels": torch.tensor([0, 1, 1]),
        "scores": torch.tensor([0.9, 0.2, 0.6]),
    }
    drawn = np.asarray(draw_objects(picture, found, ("cat", "dog"), threshold=0.5)).sum(-1) > 0
    assert not np.asarray(picture).any()
    assert drawn[60, 40:121].all() and drawn[60:141, 120].all()  # edges of the cat
    assert drawn[80:91, 0].any()  # the long one, clipped
    assert not drawn[110:150, 150:190].any()  # not likely enough
    assert drawn[45:59, 45:60].any()  # a name above the box
    assert np.asarray(draw_objects(picture, found, ("cat", "dog"), threshold=1.1)).max() == 0
