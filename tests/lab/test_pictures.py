"""Pictures: every place that opens one sees it upright, in colour, with 8 bits a channel."""

import io

import numpy as np
import pytest

pytest.importorskip("timm")

from class_folders import brightness, jpeg, write_folder, write_tar
from PIL import Image, ImageOps

from ripple_lab.data import folders
from ripple_lab.data.folders import SkipDamaged, open_folder
from ripple_lab.data.pictures import PictureError, in_colour, open_image, open_picture
from ripple_lab.data.synthetic import synthetic_images

ALL_OF_16_BITS = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
LITTLE, BIG, NATIVE = (ALL_OF_16_BITS.astype(order).tobytes() for order in ("<u2", ">u2", "=u2"))


def saved(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def assert_scaled(picture):
    """It is the nearest grey of 8 bits, from black to white."""
    assert picture.mode == "RGB"
    expected = np.rint(ALL_OF_16_BITS / 65535 * 255).astype(np.uint8)
    assert (np.asarray(picture) == expected[..., None]).all()


@pytest.mark.parametrize(
    "image",
    [
        *(
            Image.frombytes(mode, (256, 256), content)
            for mode, content in (("I;16", LITTLE), ("I;16L", LITTLE), ("I;16B", BIG))
        ),
        Image.frombytes("I;16N", (256, 256), NATIVE),
        Image.fromarray(ALL_OF_16_BITS.astype(np.int32)),
    ],
    ids=lambda image: image.mode,
)
def test_16_bits_are_scaled_to_8(image):
    assert_scaled(in_colour(image))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_files_of_16_bits_are_not_white(form, tmp_path):
    content = saved(Image.fromarray(ALL_OF_16_BITS), form)
    path = tmp_path / "train" / "a" / "1.png"  # what it is, its content decides
    write_folder(tmp_path / "train", {"a/1.png": content})
    assert_scaled(open_folder("", str(tmp_path), True, False)[0][0])
    assert_scaled(open_image(path))
    with Image.open(path) as image:
        assert_scaled(folders.TorchvisionPictures([(image, 0)], ("a",))[0][0])


@pytest.mark.parametrize(
    "image",
    [
        Image.new("L", (2, 1), 77),
        Image.new("RGBA", (2, 1), (1, 2, 3, 4)),
        Image.new("CMYK", (2, 1), (1, 2, 3, 4)),
        Image.new("1", (2, 1), 1),
        Image.new("RGB", (2, 1), (7, 8, 9)).quantize(),
    ],
    ids=lambda image: image.mode,
)
def test_8_bits_are_converted_as_pillow_does(image):
    picture = in_colour(image)
    assert picture.mode == "RGB" and picture.tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("pixels", "came"),
    [
        (np.float32([[0.5, 1]]), "mode F, of 32"),
        (np.int32([[-1, 5]]), "mode I with values from -1 to 5"),
        (np.int32([[7, 65536]]), "mode I with values from 7 to 65,536"),
    ],
)
def test_more_than_16_bits_are_refused_with_rule_and_remedy(pixels, came, tmp_path):
    write_folder(tmp_path / "val", {"a/1.png": saved(Image.fromarray(pixels), "TIFF")})
    write_folder(tmp_path / "val", {"a/2.png": jpeg(9)})
    path = tmp_path / "val" / "a" / "1.png"
    said = f"pictures have 8 or 16 bits a channel; it has {came}: scale its values and save it anew"
    with pytest.raises(PictureError, match=said):
        open_picture(path)
    with pytest.raises(ValueError, match=f"^{path} cannot be read as a picture: {said}[^\n]+$"):
        open_image(path)
    data = SkipDamaged(open_folder("", str(tmp_path), False, False), brightness, train=False)
    with pytest.warns(UserWarning, match=rf"val/a/1.png cannot be decoded.*\({said}"):
        assert data[0] == (0, -1)
    assert data[1] == (9, 0) and data.damaged == 1


def turned(image, orientation, form):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, form, exif=exif)


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_class_folders_are_turned_upright_as_predict_does(orientation, form, tmp_path):
    content = turned(synthetic_images(1, 16, 1, seed=0)[0][0].resize((8, 5)), orientation, form)
    with Image.open(io.BytesIO(content)) as image:
        pixels, expected = np.asarray(image), ImageOps.exif_transpose(image)
        torchvisions = folders.TorchvisionPictures([(image.convert("RGB"), 0)], ("a",))[0][0]
    assert (np.asarray(expected).tobytes() == pixels.tobytes()) == (orientation == 1)
    write_folder(tmp_path / "train", {"a/1.png": content})
    write_tar(tmp_path / "val.tar", {"a/1.png": content})
    seen = [open_folder("", str(tmp_path), train, False)[0][0] for train in (True, False)]
    for picture in (*seen, open_image(tmp_path / "train" / "a" / "1.png"), torchvisions):
        assert picture.size == expected.size
        assert picture.tobytes() == expected.tobytes()
        assert in_colour(picture).tobytes() == picture.tobytes()  # it is not turned again


def test_pictures_of_16_bits_are_turned_too():
    content = turned(Image.fromarray(ALL_OF_16_BITS[:2]), 6, "PNG")
    picture = open_picture(io.BytesIO(content))
    assert picture.size == (2, 256)
    assert picture.getpixel((0, 255)) == (2, 2, 2)  # 511, of 65,535


@pytest.mark.parametrize("tag", [b"Exif\0\0no tags at all", b"Exif\0\0II*\0\xff\xff\xff\xff", b"E"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_tag_that_cannot_be_read_says_nothing(tag):
    picture = open_picture(io.BytesIO(saved(Image.new("RGB", (4, 3), (90, 0, 0)), exif=tag)))
    assert picture.size == (4, 3) and picture.getpixel((0, 0)) == (90, 0, 0)
