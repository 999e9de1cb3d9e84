"""Pictures of files, all read in one way: upright, in colour, 8 bits a channel."""

import os
import stat
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

WHITE = 2**16 - 1  # of 16 bits


class PictureError(ValueError):
    """A picture that is no file, or whose range from black to white is unknown."""


def open_picture(
    file: str | Path | IO[bytes], formats: tuple[str, ...] | None = None
) -> Image.Image:
    """The picture in a file, as `in_colour` makes it.

    Args:
        file: Its path, or the open file.
        formats: Whose decoders are tried; all unless given.
    """
    if isinstance(file, str | Path):
        check_file(file)
    with Image.open(file, formats=formats) as image:
        return in_colour(image)


def open_image(path: Path) -> Image.Image:
    """A picture in colour, upright."""
    try:
        return open_picture(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder: name the pictures in it") from None
    except PictureError as error:
        raise ValueError(f"{path} cannot be read as a picture: {error}") from None
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{path} cannot be read as a picture ({error}): save it anew, as PNG or JPEG"
        ) from None


def check_file(path: str | Path) -> None:
    """Refuses pipes, devices and sockets: to open one may wait for ever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder says that it is one
        raise PictureError("it is a pipe, a device or a socket: name a file")


def in_colour(image: Image.Image, upright: bool = True) -> Image.Image:
    """An RGB copy of a picture; 16 bits a channel are scaled to 8.

    Args:
        image: The picture, of any mode; "I" with values up to 65,535 is taken to have 16 bits.
        upright: Turn it as its EXIF tag says.

    Raises:
        PictureError: It has more than 16 bits a channel.
    """
    image.load()  # so that whatever fails after this is not the pixels
    if image.mode == "F":
        raise PictureError(_refusal("mode F, of 32"))
    if image.mode.startswith("I"):
        picture = _from_16_bits(image)
        picture.info = dict(image.info)
    else:
        picture = image.convert("RGB")
    if upright:
        _turn(picture)
    return picture


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int32)
    least, most = int(values.min()), int(values.max())
    if least < 0 or most > WHITE:
        raise PictureError(_refusal(f"mode {image.mode} with values from {least:,} to {most:,}"))
    return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")


def _turn(picture: Image.Image) -> None:
    """Turns a picture as its EXIF tag says; what cannot be read says nothing."""
    try:
        ImageOps.exif_transpose(picture, in_place=True)
    except Exception:  # damaged tags raise errors of every kind
        picture.info.pop("exif", None)


def _refusal(came: str) -> str:
    return (
        f"pictures have 8 or 16 bits a channel; it has {came}: "
        "scale its values and save it anew, as PNG"
    )
