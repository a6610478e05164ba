"""The state that a host's own checkpoint leaves out, in a file beside it.

The sidecar carries the checkpoint's SHA-256. It is written first and under its own name, and older ones are removed
after the checkpoint took its place: a kill at any instant leaves a checkpoint together with the state that belongs
to it.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plugins.core.checkpoint.atomic_file import on_cpu, write_atomically
from plugins.core.checkpoint.plain_file import NotPlain, read_plain
from plugins.errors import AccelError

SUFFIX = ".accel"
IDENTITY = 12  # hexadecimal digits of the checkpoint's SHA-256 in the name


class DamagedState(AccelError):
    """Extra state that cannot be read; the message is one line that names the file."""


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def sidecar_path(checkpoint: Path, identity: str) -> Path:
    """Where the extra state of this checkpoint lies: `last.0123456789ab.accel`."""
    return checkpoint.with_name(f"{checkpoint.stem}.{identity[:IDENTITY]}{SUFFIX}")


def save_sidecar(checkpoint: Path, data: bytes | memoryview, state: Mapping[str, Any]) -> Path:
    """Write the extra state that belongs to a checkpoint about to hold `data`; returns its path."""
    identity = hashlib.sha256(data).hexdigest()
    target = sidecar_path(checkpoint, identity)
    whole = {"checkpoint": identity, **on_cpu(state)}
    with _no_checksums():
        write_atomically(target, lambda file: torch.save(whole, file))
    return target


@contextmanager
def _no_checksums() -> Iterator[None]:
    """`torch.load` looks at no checksum of a record, and they are a third of the time of a save."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def load_sidecar(checkpoint: Path) -> dict[str, Any] | None:
    """The extra state that belongs to this very checkpoint, or None (a host's own, or one written by another run).

    Raises:
        DamagedState
    """
    identity = digest(checkpoint)
    target = sidecar_path(checkpoint, identity)
    if not target.is_file():
        return None
    try:
        state = read_plain(target)
        return dict(state) if state["checkpoint"] == identity else None
    except NotPlain as error:
        raise DamagedState(f"{target}: damaged ({error})") from None
    except Exception as error:
        raise DamagedState(f"{target}: damaged ({type(error).__name__})") from None


def drop_sidecars(checkpoint: Path, keep: Path | None = None) -> None:
    """Remove the extra state of earlier writes of this checkpoint."""
    identity = "[0-9a-f]" * IDENTITY
    for old in checkpoint.parent.glob(f"{glob.escape(checkpoint.stem)}.{identity}{SUFFIX}"):
        if old != keep:
            old.unlink(missing_ok=True)
