"""Pictures from strangers: checked before they are decoded, and never written anywhere."""

import warnings
from io import BytesIO

from PIL import Image

from ripple_lab.data.pictures import open_picture

MAX_BYTES = 10 * 2**20
MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP")


class UploadError(ValueError):
    """A file is refused. The message tells the person who sent it why."""


def decode(data: bytes) -> Image.Image:
    """A picture in colour, upright, from the bytes of a PNG, JPEG or WebP file.

    Decoders of other formats are never tried. Size and structure are checked before a pixel is
    decoded. Only the first picture of an animation is taken.
    """
    if len(data) > MAX_BYTES:
        raise UploadError(
            f"A picture may have {MAX_BYTES / 2**20:.0f} MB; this one has "
            f"{len(data) / 2**20:.1f} MB. Please make it smaller."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise UploadError(
                        f"A picture may have {MAX_PIXELS:,} pixels; this one has {width:,} × "
                        f"{height:,}. Please make it smaller."
                    )
                image.verify()
            return open_picture(BytesIO(data), FORMATS)  # anew: verify() used it up
    except UploadError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UploadError(
            f"A picture may have {MAX_PIXELS:,} pixels; this one has far more."
        ) from None
    except Exception:  # decoders raise errors of every kind on broken files
        raise UploadError(
            "This file cannot be read as a picture: it is broken, cut short, or not a PNG, JPEG or "
            "WebP. Please try another."
        ) from None
