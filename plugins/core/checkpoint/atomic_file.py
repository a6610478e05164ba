"""Files that are the old one or the new one at every instant, never half."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map


class AtomicPath(type(Path())):  # type: ignore[misc]
    """A path whose `write_bytes` is atomic, and whose children (`path / name`) are such paths too.

    `around(path, data)`, where set on an instance, is a context manager that the write happens in.
    """

    around: Callable[[Path, memoryview], AbstractContextManager[None]] | None = None

    def write_bytes(self, data: Any) -> int:
        """Write the file whole or not at all."""
        view = memoryview(data)
        with self.around(self, view) if self.around is not None else nullcontext():
            write_atomically(self, lambda file: file.write(view))
        return view.nbytes


def write_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file so that it is the old one or the new one at every instant, also after a power cut.

    Raises:
        OSError: disk full, read-only, ...; the old file is untouched, the unfinished one removed, and the message
            names the file.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _naming(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            given = _Given(file)
            write(given)
            given.check()
            file.flush()
            os.fsync(file.fileno())
        _keep_mode(path, name)
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _naming(path, error) from error
        raise
    _sync_folder(path.parent)


class _Given(io.RawIOBase):
    """The file as its writer sees it: a full disk is told once the writer is done.

    `torch.save` turns an error of the file into one of its own, which names neither the disk nor the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                return self._file.write(data)
            except OSError as error:
                self._error = error
        return memoryview(data).nbytes

    def check(self) -> None:
        """Raises the OSError that a write met."""
        if self._error is not None:
            raise self._error


def _naming(path: Path, error: OSError) -> OSError:
    """The same error, with the file that was to be written in place of the temporary one."""
    if error.errno is None:
        return OSError(f"{error}: cannot write: {str(path)!r}")
    return OSError(error.errno, f"{error.strerror}: cannot write", str(path))


def sweep(folder: Path) -> None:
    """Remove unfinished files that a killed process left."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def on_cpu(state: Any) -> Any:
    """The same dicts, lists and values with every tensor on the CPU: a file that loads where this device is not.

    Tensors that are one on the device (tied weights) are one on the CPU. NumPy's numbers, which schedulers and hosts
    leave as rates, become Python's: a file of plain values cannot be read with them.
    """
    moved: dict[Any, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        place = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype
        if place not in moved:
            moved[place] = value.detach().cpu()
        return moved[place]

    return tree_map(move, state)


def _keep_mode(path: Path, temporary: str) -> None:
    """A temporary file is private; give the result the mode that an ordinary write would have given."""
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    Path(temporary).chmod(mode)


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows cannot open a folder
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
