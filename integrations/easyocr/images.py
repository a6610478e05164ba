"""Picture files as `easyocr.Reader` sees them: their size before they are decoded, their grey values after."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
from PIL import Image

# What Pillow raises over a file that is gone, damaged, or larger than it takes.
UNDECODABLE = (OSError, SyntaxError, ValueError, AttributeError, Image.DecompressionBombError)
# A reason to leave a picture out.
HIDDEN = "one colour to the Reader, which drops transparency"
_EXIF_ORIENTATION, _SIDEWAYS = 0x0112, {5, 6, 7, 8}
# Formats that the Reader's decoder turns by EXIF and Pillow's `size` does not: a TIFF's is turned already, and an AVIF
# lies as it is stored in both.
_TURNED = {"JPEG", "MPO", "PNG", "WEBP"}


def find_picture(leaf: Path, name: str) -> Path:
    """The file of that name, also where a disk or an archive wrote it in another Unicode form, or Windows the row."""
    spelt = name.replace("\\", "/")
    forms = (name, *(unicodedata.normalize(form, spelt) for form in ("NFC", "NFD")))
    try:
        return next((leaf / form for form in forms if (leaf / form).exists()), leaf / name)
    except (OSError, ValueError):  # a name that no file can have
        return leaf / name


def size_of(path: Path) -> tuple[int, int] | str:
    """(width, height) in px from the file's header, or the reason why there is none."""
    try:
        if not path.is_file():
            return "missing image"
    except (OSError, ValueError):  # a name that no file can have: too long, or with a null character
        return "missing image"
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            transparent = picture.has_transparency_data
            # Pillow decodes a whole PNG to look for EXIF behind its pixels; only what its header tells counts here.
            tagged = picture.format in _TURNED and (picture.format != "PNG" or "exif" in picture.info)
            sideways = tagged and picture.getexif().get(_EXIF_ORIENTATION) in _SIDEWAYS
    except Exception:  # as in is_whole
        return "corrupt image"
    if transparent and (grey := read_grey(path)) is not None and grey.min() == grey.max():
        return HIDDEN
    return (height, width) if sideways else (width, height)


def grey_of(picture: Image.Image) -> np.ndarray:
    """A picture as uint8 [h, w]; one of 16 bits loses its lower 8, as where the Reader reads its file.

    Pillow's own conversion cuts such values off at 255, which leaves a white picture.
    """
    if not picture.mode.startswith(("I", "F")):
        return np.asarray(picture.convert("L"))
    values = np.nan_to_num(np.asarray(picture, dtype=np.float64))
    if picture.mode == "F" and values.max(initial=0) <= 1:
        values = values * 255  # shares of white
    elif values.max(initial=0) > 255 or picture.mode.startswith("I;16"):
        values = values // 256
    return values.clip(0, 255).astype(np.uint8)


def read_grey(path: Path) -> np.ndarray | None:
    """A file as uint8 [h, w], by the Reader's own decoder; None if it cannot be decoded.

    Decoded from memory: Ultralytics, where it is imported, puts a function of its own in place of `cv2.imread`.
    """
    import cv2

    data = np.fromfile(path, dtype=np.uint8)
    return cv2.imdecode(data, cv2.IMREAD_GRAYSCALE) if data.size else None


def is_whole(path: Path) -> bool:
    """Whether the file decodes to its end."""
    try:
        with Image.open(path) as picture:
            picture.load()
    except Exception:  # also what a plugged-in opener raises, such as a missing library of its own
        return False
    return True
