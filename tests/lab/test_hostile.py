"""Files that mean harm, or are broken: their text only shows, each refusal is one clear line."""

import json
import os
import re
import warnings

import pytest

pytest.importorskip("timm")

from class_folders import jpeg, write_folder
from PIL import Image
from small_run import write_small_run
from test_detection_data import CONTENT, changed, write_coco
from typer.testing import CliRunner

from ripple_lab import commands as cli
from ripple_lab.bench.op import read_csv
from ripple_lab.console import PlainConsole, show_warning
from ripple_lab.data.folders import SkipDamaged, open_folder
from ripple_lab.data.images import DataError
from ripple_lab.data.pictures import open_image
from ripple_lab.detection.coco import open_coco
from ripple_lab.detection.drawing import draw_objects
from ripple_lab.inspection.explain import Explainer
from ripple_lab.inspection.viewer import Viewer
from ripple_lab.text import markdown, plain

NAMES = (
    "[bold]rose[/bold]",
    "[/no such tag]",
    ":bomb:",
    "\x1b[2J\x1b]0;title\x07",
    "two\nlines\r",
    "<img src=x onerror=alert(1)>",
    "**a** | _b_ `c` [d](e)",
    r"$\frac{",
    "right\u202eleft\u200b",
    "byte \udcff",
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return write_small_run(tmp_path_factory.mktemp("hostile") / "run", classes=NAMES)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "[red]\x1b[31mred.png"
    Image.new("L", (32, 32), 90).save(path)
    return path


def ripple(*words):
    return CliRunner().invoke(cli.app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_a_console_shows_names_as_they_are(hostile, picture):
    done = ripple("predict", hostile, picture, "--top", len(NAMES))
    assert done.exit_code == 0, done.exception
    assert "\x1b" not in done.output and "\r" not in done.output and "\u202e" not in done.output
    for name in (*NAMES, str(picture)):
        assert all(plain(line) in done.output for line in name.split("\n"))


def test_an_explanation_is_drawn_whatever_classes_are_called(hostile, picture, tmp_path):
    done = ripple("explain", hostile, picture, "--output", tmp_path / "[x].png")
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "[x].png").exists() and "[x].png" in done.output


def test_the_page_shows_names_as_they_are(hostile, picture):
    viewer = Viewer(hostile)
    (choice,) = viewer.choices
    explainer = viewer.explainer(choice)
    for place in range(len(NAMES)):
        explainer.classes = NAMES[place:] + NAMES[:place]  # each is the likeliest once
        answer = viewer.answer(choice, open_image(picture))
        likeliest = explainer(open_image(picture)).classes[0][0]
        assert f"**{markdown(likeliest)}**" in answer.words
        assert not re.search(r"(?<!\\)<", answer.words)
        assert all(name.isprintable() for name in answer.classes)


def test_objects_are_drawn_whatever_they_are_called():
    import torch

    found = {"boxes": torch.tensor([[2.0, 20, 30, 40]] * len(NAMES))}
    found["labels"] = torch.arange(len(NAMES))
    assert draw_objects(Image.new("RGB", (64, 64)), found, NAMES).size == (64, 64)


@pytest.mark.parametrize("names", [NAMES[:3], (), (*NAMES, "one more"), (*NAMES[:9], "x" * 10**5)])
@pytest.mark.parametrize("command", ["predict", "explain"])
def test_names_that_are_not_those_of_the_head_are_refused(names, command, picture, tmp_path):
    run = write_small_run(tmp_path / "run", classes=names)
    error = ripple(command, run, picture).exception
    assert isinstance(error, ValueError) and str(run / "model.safetensors") in str(error)
    assert len(str(error)) < 400


def test_a_model_with_too_few_names_is_refused(hostile, picture):
    model = Explainer.from_checkpoint(hostile).model
    with pytest.raises(ValueError, match="one name for each of its 10 classes; .* has 2"):
        Explainer.from_model(model, ["a", "b"])(open_image(picture))


def test_warnings_show_names_as_they_are(capsys):
    show_warning(UserWarning(f"{NAMES[3]} cannot be decoded"), UserWarning)
    assert "\\x1b[2J" in capsys.readouterr().err


def test_the_console_keeps_its_own_lines(capsys):
    PlainConsole().print("first [line]\nsecond")
    assert capsys.readouterr().out == "first [line]\nsecond\n"


def image_named(name):
    return changed(images=[CONTENT["images"][0] | {"file_name": name}, *CONTENT["images"][1:]])


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (NESTED, "nested too deeply"),
        (f'{{"images": {NESTED}}}', "nested too deeply"),
        (json.dumps(changed(info=0)).replace('"info": 0', f'"info": {NESTED}'), "nested"),
        (b'{"images": "\xff\xfe"}', "not JSON"),
        (image_named("x" * 10**6), "1 to 255 bytes"),
        (image_named("語" * 100), "1 to 255 bytes"),
        (image_named(""), "1 to 255 bytes"),
        (image_named("../seven.png"), "outside the folder"),
        (image_named("a/../../seven.png"), "outside the folder"),
        (image_named("/etc/passwd"), "outside the folder"),
        (changed(annotations=[], categories=[{"id": 5, "name": "x" * 10**6}]), "of 1,000,000 char"),
        (changed(annotations=[{"id": "\x1b[2J" + "x" * 10**6}]), r"annotation \x1b[2Jxxx"),
        (changed(annotations=[{"id": [["x" * 10**6]]}]), "annotation [['xxx"),
    ],
)
def test_hostile_annotations_are_one_short_line_that_names_the_file(tmp_path, content, said):
    write_coco(tmp_path)
    path = tmp_path / "annotations/instances_train2017.json"
    content = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        open_coco(str(tmp_path), train=True)
    assert said in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_names_that_no_file_can_have_are_images_that_are_missing(tmp_path):
    write_coco(tmp_path, image_named("nul\0.png"), split="val2017")
    data = open_coco(str(tmp_path), train=False)
    with pytest.raises(ValueError, match="null"):
        data[0]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "picture.png"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{path} cannot be read as a picture: it is a pipe"):
        open_image(path)
    write_coco(tmp_path / "coco", split="val2017")
    path.rename(tmp_path / "coco/val2017/seven.png")
    with pytest.raises(ValueError, match="it is a pipe"):
        open_coco(str(tmp_path / "coco"), train=False)[0]
    write_folder(tmp_path / "folders/train", {"a/1.jpg": jpeg(9), "b/2.jpg": jpeg(9)})
    os.mkfifo(tmp_path / "folders/train/a/0.jpg")
    data = open_folder("", str(tmp_path / "folders"), True, False)
    with pytest.warns(UserWarning, match=r"a/0\.jpg cannot be decoded.*it is a pipe"):
        SkipDamaged(data, lambda image: image, train=True)[0]


@pytest.mark.parametrize("link", ["a/up", "a/again", "elsewhere/back"])
def test_loops_of_links_in_class_folders_are_seen(tmp_path, link):
    train = tmp_path / "train"
    write_folder(train, {"a/1.jpg": jpeg(9), "b/2.jpg": jpeg(9)})
    (tmp_path / "other").mkdir()
    (train / "elsewhere").symlink_to(tmp_path / "other")  # which is allowed
    assert len(open_folder("", str(tmp_path), True, False)) == 2
    (train / link).symlink_to(train / "a" if link == "a/again" else train)
    with pytest.raises(DataError, match=f"{train / link} is a link to .* in which it lies"):
        open_folder("", str(tmp_path), True, False)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"", b"tokens,x\n1", b"a\0b\n1\n", b"tokens\nx\n"]
)
def test_a_damaged_table_of_a_benchmark_is_named(tmp_path, content):
    path = tmp_path / "op.csv"
    path.write_bytes(content)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=re.escape(str(path))):
        read_csv(path)
