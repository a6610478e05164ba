"""A run's folder: it is there, and this run alone writes in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plugins.errors import AccelError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]


class FolderInUse(AccelError):
    """The folder cannot be made, or another process writes in it; one line that names it."""


@contextmanager
def run_lock(folder: Path, *inner: str) -> Iterator[None]:
    """Inside, `folder` and its `inner` ones are there and this process alone writes in them.

    The claim goes with the process, however it ends. Folders that were made here and stayed empty are removed: a run
    that is refused leaves nothing.

    Raises:
        FolderInUse: a folder cannot be made, or another run has it.
    """
    wanted = [*(folder / name for name in inner), folder]
    new: list[Path] = []
    try:
        try:
            new = [path for path in (*wanted, *folder.parents) if not path.exists()]  # innermost first
            for path in wanted:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderInUse(f"{folder}: {error.strerror}: {error.filename}") from None
        with _locked(folder):
            yield
    finally:
        for path in new:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if fcntl is None:  # Windows
        yield
        return
    path = folder / ".lock"
    try:
        file = path.open("w")
    except OSError as error:
        raise FolderInUse(f"{folder}: {error.strerror}: {path}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FolderInUse(f"{folder}: another run writes here") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
