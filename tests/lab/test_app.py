"""`ripple app`: what it takes, what it answers, and the page itself in a real browser."""

import http.client
import os
import re
import shutil
import struct
import time
import urllib.request
import zlib
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image
from small_run import write_small_run

from ripple_lab.data.digits import load_digits_images
from ripple_lab.inspection import app, uploads
from ripple_lab.inspection.guard import sweep
from ripple_lab.inspection.uploads import UploadError, decode
from ripple_lab.inspection.viewer import (
    EMBEDDED_CHOICE,
    EXAMPLES,
    Viewer,
    clickable,
    find_checkpoints,
    patch_at,
    trained_settings,
)
from ripple_lab.inspection.views import Settings


def encoded(form, size=(20, 10), **options):
    buffer = BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_decoded(form):
    image = decode(encoded(form))
    assert image.mode == "RGB" and image.size == (20, 10)
    assert image.getpixel((5, 5))[0] > 150


def test_pictures_are_turned_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    assert decode(encoded("JPEG", exif=exif)).size == (10, 20)


def png_that_claims(width, height):
    """A small file whose header promises many pixels."""

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 64))
        + chunk(b"IEND", b"")
    )


REFUSED = {
    "words": (b"not a picture at all", "cannot be read as a picture"),
    "nothing": (b"", "cannot be read as a picture"),
    "cut short": (encoded("PNG", (300, 300))[:-40], "cannot be read as a picture"),
    "JPEG cut short": (encoded("JPEG", (300, 300))[:600], "cannot be read as a picture"),
    "another format": (encoded("GIF"), "PNG, JPEG or WebP"),
    "many pixels": (png_that_claims(7000, 7000), "7,000 × 7,000"),
    "a bomb": (png_that_claims(60_000, 60_000), "pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_with_words(name):
    data, words = REFUSED[name]
    with pytest.raises(UploadError, match=words):
        decode(data)


def test_files_that_are_too_large_are_refused(monkeypatch):
    monkeypatch.setattr(uploads, "MAX_BYTES", 50)
    with pytest.raises(UploadError, match="MB"):
        decode(encoded("PNG"))


@pytest.mark.parametrize(("data", "works"), [(encoded("PNG"), True), (b"words", False)])
def test_uploads_do_not_stay(tmp_path, data, works):
    file = tmp_path / "upload.png"
    file.write_bytes(data)
    if works:
        assert app.receive(str(file)).size == (20, 10)
    else:
        with pytest.raises(UploadError):
            app.receive(str(file))
    assert not file.exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for age, name in enumerate(("newest", "older")):
        file = write_small_run(root / name, seed=age) / "model.safetensors"
        os.utime(file, (2e9 - age, 2e9 - age))
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes(b"cut short")
    os.utime(root / "broken" / "model.safetensors", (2.1e9, 2.1e9))
    (root / "unfinished").mkdir()
    return root


@pytest.fixture(scope="module")
def viewer(runs):
    return Viewer(runs)


@pytest.fixture(scope="module")
def digit():
    return load_digits_images(train=False)[5][0]


def test_the_newest_run_that_can_be_read_comes_first(runs, viewer):
    assert [path.parent.name for path in find_checkpoints(runs)] == ["broken", "newest", "older"]
    assert Path(viewer.first_choice()).parent.name == "newest"
    assert EMBEDDED_CHOICE not in viewer.choices


def test_a_run_or_a_file_may_be_named(runs):
    for path in (runs / "older", runs / "older" / "model.safetensors"):
        assert Viewer(path).choices == [str(runs / "older" / "model.safetensors")]
    with pytest.raises(ValueError, match="folder of a run"):
        Viewer(runs / "unfinished")


def test_the_embedded_model_comes_first_unless_another_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    viewer = Viewer()
    assert viewer.choices == [EMBEDDED_CHOICE] and viewer.first_choice() == EMBEDDED_CHOICE
    answer = viewer.answer(EMBEDDED_CHOICE, EXAMPLES["flower"]())
    assert "rose" in answer.classes and len(answer.classes) == 5
    monkeypatch.chdir(runs.parent)
    monkeypatch.setattr(
        "ripple_lab.inspection.viewer.find_checkpoints", lambda _: [runs / "newest"]
    )
    viewer = Viewer()
    assert viewer.choices == [EMBEDDED_CHOICE, str(runs / "newest")]
    assert viewer.first_choice() == EMBEDDED_CHOICE


def test_only_listed_checkpoints_are_opened(viewer, digit):
    with pytest.raises(ValueError, match="must be one of"):
        viewer.answer("/etc/passwd", digit)


def test_a_click_changes_the_answer(viewer, digit):
    choice = viewer.first_choice()
    first, second = (viewer.answer(choice, digit, at) for at in ((0, 0), (3, 2)))
    assert first.classes == second.classes and len(first.classes) == 5
    for part in ("layers", "heads", "words"):
        assert getattr(first, part) != getattr(second, part)
    assert "row 3, column 2" in second.words
    assert viewer.answer(choice, digit, (99, 2)).words == second.words  # the nearest inside


def test_layers_have_heads_of_their_own(viewer, digit):
    choice = viewer.first_choice()
    first, second = (viewer.answer(choice, digit, layer=layer) for layer in (0, 1))
    assert first.layers == second.layers
    assert first.heads != second.heads


def test_sliders_show_what_changes(viewer, digit):
    choice = viewer.first_choice()
    settings = trained_settings(viewer.explainer(choice))
    assert settings == Settings(4, 0.05)
    trained, same = viewer.answer(choice, digit), viewer.answer(choice, digit, settings=settings)
    assert (same.words, same.layers, same.heads) == (trained.words, trained.layers, trained.heads)
    for other in (Settings(1, 0.05), Settings(4, 0.5)):
        changed = viewer.answer(choice, digit, settings=other)
        assert "As trained" in changed.words and "As trained" not in trained.words
        assert changed.layers != trained.layers
        (share,) = re.findall(r"\*\*([\d.]+)%\*\* of this patch", changed.words)
        assert 0 < float(share) <= 100


def test_a_click_finds_the_patch_that_is_boxed(viewer, digit):
    explanation = viewer.explainer(viewer.first_choice())(digit)
    image = clickable(explanation, (1, 3))
    red = [
        (x, y)
        for x in range(0, image.width)
        for y in range(0, image.height)
        if image.getpixel((x, y)) == (255, 0, 0)
    ]
    assert red
    assert {patch_at(x, y, explanation.grid_size) for x, y in red} == {(1, 3)}


def test_examples_are_there_without_a_network():
    assert all(picture().convert("RGB").width >= 32 for picture in EXAMPLES.values())


def test_pictures_lie_in_a_folder_that_goes(monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "before")
    with app.kept_in_memory() as folder:
        assert os.environ["GRADIO_TEMP_DIR"] == str(folder)
        (folder / "picture.png").write_bytes(b"1")
    assert not folder.exists()
    assert os.environ["GRADIO_TEMP_DIR"] == "before"


@pytest.fixture(scope="module")
def address(viewer):
    pytest.importorskip("gradio", reason="the page needs gradio: pip install '.[app]'")
    with app.served(viewer) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        ("", {"Host": "evil.example"}, None, 400),
        ("", {"Host": "127.0.0.1.evil.example:7860"}, None, 400),
        ("", {"Origin": "http://evil.example"}, None, 403),
        ("", {"Origin": "null"}, None, 403),
        ("/gradio_api/upload", {"Content-Length": str(11 * 2**20)}, b"", 413),
        ("/gradio_api/queue/join", {"Content-Length": str(2**17)}, b"", 413),
        ("/gradio_api/queue/join", {"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 411),
        ("", {"Host": "localhost"}, None, 200),
    ],
)
def test_requests_that_are_not_for_the_page_are_refused(address, path, headers, body, status):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    connection.putrequest("GET" if body is None else "POST", path or "/", skip_host=True)
    for name, value in ({"Host": place.netloc} | headers).items():
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == status
    connection.close()


def test_uploads_that_nobody_looks_at_go_away(tmp_path):
    now = time.time()
    for age in range(6):
        file = tmp_path / f"{age}" / "upload.png"
        file.parent.mkdir()
        file.write_bytes(bytes(100))
        os.utime(file, (now - 100 * age, now - 100 * age))
    left = lambda: sorted(path.parent.name for path in tmp_path.rglob("*.png"))
    sweep(tmp_path, most=400, seconds=1e4)
    assert left() == ["0", "1", "2", "3"]
    sweep(tmp_path, most=400, seconds=150)
    assert left() == ["0", "1"]


def test_a_session_keeps_a_picture_of_modest_size(tmp_path):
    file = tmp_path / "upload.png"
    file.write_bytes(encoded("PNG", (5000, 4000)))
    assert app.receive(str(file)).size == (1024, 819)


def test_the_page_names_no_other_server(address):
    assert urlsplit(address).hostname == "127.0.0.1"
    with urllib.request.urlopen(address, timeout=30) as answer:
        text, headers = answer.read().decode(), answer.headers
    assert "default-src 'self'" in headers["content-security-policy"]
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(https?:[^\"]*)", text)
    assert loaded == []
    assert "fonts.g" not in text


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def test_the_page_in_a_browser(address, browser, tmp_path):
    """Loads, predicts, a click changes the maps, a bad upload is refused, nothing leaves.

    RIPPLE_APP_SCREENSHOT names a file for a picture of the page.
    """
    from playwright.sync_api import expect

    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    asked, troubles = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda m: troubles.append(m.text) if m.type == "error" else None)
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    page.goto(address)
    maps = page.locator("#layers img")
    maps.wait_for()
    assert page.locator("#classes").inner_text().count("%") == 5
    words = page.locator("#words")
    assert "row 2, column 2" in words.inner_text()

    before = maps.get_attribute("src"), page.locator("#heads img").get_attribute("src")
    box = page.locator("#picture img").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.1)
    words.get_by_text("row 0, column 3").wait_for()
    after = maps.get_attribute("src"), page.locator("#heads img").get_attribute("src")
    assert before[0] != after[0] and before[1] != after[1]
    seen = maps.bounding_box()  # without scrolling
    assert seen["y"] >= 0 and seen["y"] + seen["height"] <= 1000

    page.locator("#picture img").evaluate(  # faster than it answers: the last counts
        """(image, points) => points.forEach(([clientX, clientY]) =>
            image.dispatchEvent(new MouseEvent("click", {bubbles: true, clientX, clientY})))""",
        [[box["x"] + box["width"] * 0.1, box["y"] + box["height"] * y] for y in (0.4, 0.6, 0.9)],
    )
    words.get_by_text("row 3, column 0").wait_for()
    expect(maps).not_to_have_attribute("src", after[0])
    after = maps.get_attribute("src"), after[1]

    page.locator("#distance input[type=number]").fill("1")
    page.locator("#distance input[type=number]").press("Enter")
    words.get_by_text("As trained").wait_for()
    assert maps.get_attribute("src") != after[0]

    bad, good = tmp_path / "bad.png", tmp_path / "good.png"
    bad.write_bytes(b"not a picture")
    good.write_bytes(encoded("PNG", (64, 64)))
    page.locator("#upload input[type=file]").set_input_files(bad)
    page.locator("#refusal").get_by_text("cannot be read as a picture").wait_for()
    page.locator("#upload").get_by_text("Drop File Here").wait_for()  # room again
    picture = page.locator("#picture img")
    shown = picture.get_attribute("src")
    page.locator("#upload input[type=file]").set_input_files(good)
    expect(picture).not_to_have_attribute("src", shown)
    assert page.locator("#refusal").inner_text().strip() == ""

    shown = picture.get_attribute("src")
    page.get_by_label("handwritten 3").check()
    expect(picture).not_to_have_attribute("src", shown)
    if "RIPPLE_APP_SCREENSHOT" in os.environ:
        page.screenshot(path=os.environ["RIPPLE_APP_SCREENSHOT"], full_page=True)
    outside = {url for url in asked if urlsplit(url).scheme not in ("data", "blob")}
    assert {urlsplit(url).hostname for url in outside} == {"127.0.0.1"}
    assert troubles == []
    page.close()


def test_names_in_the_page_are_text(browser, tmp_path):
    name = "<img src=x onerror='window.harmed=1'> **bold** $$x$$ <b id=harm>"
    run = write_small_run(tmp_path / "run", classes=tuple(f"{i} {name}" for i in range(10)))
    with app.served(Viewer(run)) as address:
        page = browser.new_page()
        page.goto(address)
        page.locator("#layers img").wait_for(timeout=60_000)
        assert name in page.locator("#words").inner_text()
        assert name in page.locator("#classes").inner_text()
        assert page.locator("#harm, #words img, #classes img").count() == 0
        assert page.evaluate("window.harmed") is None
        page.close()
