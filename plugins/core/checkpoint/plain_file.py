"""Reading a file of plain values and tensors that may be a stranger's: no code runs, and no more memory than its size.

`weights_only=True` sees to the code. For the memory, a file's directory is looked at before it is read (a packed zero
is a thousandth of itself), and every tensor after: one number can pose as a tensor of any shape.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

PACKED = 20  # times its size that a file may unpack to; torch itself packs nothing
SMALL = 2**24  # bytes that any file may unpack to


class NotPlain(ValueError):
    """Why the file cannot be read, in a few words that do not name it."""


def read_plain(path: Path) -> Any:
    """Plain values, and tensors on the CPU.

    Raises:
        NotPlain: damaged, not plain, or it stands for far more than its own size.
    """
    try:
        size = path.stat().st_size
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                whole = sum(part.file_size for part in file.infolist())
            if whole > max(PACKED * size, SMALL):
                raise NotPlain(f"its {size} bytes unpack to {whole}")
        found = torch.load(path, map_location="cpu", weights_only=True)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.numel() * leaf.element_size() > max(PACKED * size, SMALL):
                raise NotPlain(f"its {size} bytes pose as a tensor of shape {list(leaf.shape)}")
    except NotPlain:
        raise
    except Exception as error:  # the unpickler runs on whatever bytes there are; its text is several lines of advice
        raise NotPlain(type(error).__name__) from None
    return found
