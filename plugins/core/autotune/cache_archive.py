"""A cache folder in one file, to warm another machine of the same kind: written from one folder, unpacked into another.

A pack comes from elsewhere, so every member is looked at before the first is written, and all are unpacked aside
before the first is put in its place.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, cast

from plugins.core.autotune.plan_cache import ENTRIES, CacheError, PlanCache
from plugins.core.checkpoint.atomic_file import write_atomically

PACKED = 100  # times its size that a pack may unpack to: code packs to a fifth
SMALL = 2**24  # bytes that any pack may unpack to
PIECE = 2**20  # bytes of one read; tarfile copies in far smaller ones
MEMBERS = 50_000


def export(memory: PlanCache, target: Path) -> int:
    """Pack plans and compiled code into one .tar.gz; returns the files in it.

    Raises:
        OSError
    """
    files, buffer = list(memory.files()), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as pack:
        for path in files:
            pack.add(path, arcname=path.relative_to(memory.folder).as_posix())
    write_atomically(target, lambda file: file.write(buffer.getbuffer()))
    return len(files)


def load(memory: PlanCache, source: Path) -> int:
    """Unpack what `export` packed; returns the files. Compiled code runs: load only packs that you trust.

    Raises:
        CacheError: no pack, one that holds anything else than `export` packs, or one that cannot be put in place;
            nothing is written then.
    """
    try:
        with gzip.open(source) as stream, _opened(stream, source) as pack:
            members = []
            for member in pack:
                members.append(_ours(member, memory.folder, source))
                if len(members) > MEMBERS:
                    raise CacheError(f"{source}: holds over {MEMBERS} files; nothing was imported")
            names = list(dict.fromkeys(member.name for member in members if member.isfile()))
            if not names:
                raise CacheError(f"{source}: holds no plan and no code; nothing was imported")
            for name in names:
                _room(memory.folder, name, source)
            memory.make()
            with tempfile.TemporaryDirectory(dir=memory.folder, prefix=".import-") as aside:
                pack.extractall(aside, members=members, filter="data")
                for name in names:
                    (memory.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(aside, name), memory.folder / name)  # noqa: PTH105
    except tarfile.FilterError as error:
        raise CacheError(f"{source}: {error}; nothing was imported") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise CacheError(
            f"{source}: cannot be imported: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from None
    return len(names)


def _opened(stream: gzip.GzipFile, source: Path) -> tarfile.TarFile:
    bounded = cast("IO[bytes]", _Bounded(stream, source))  # of which tarfile reads, seeks and asks where it stands
    return tarfile.open(fileobj=bounded, mode="r:")


class _Bounded:
    """The unpacked bytes of a pack, which are no bomb: not far more than its own size, and read in small pieces.

    `tarfile` takes a header's word for how much to read at once.
    """

    def __init__(self, stream: gzip.GzipFile, source: Path) -> None:
        self.stream, self.source = stream, source
        self.most = max(PACKED * source.stat().st_size, SMALL)

    def read(self, size: int) -> bytes:
        if size > PIECE or self.stream.tell() + size > self.most + PIECE:
            raise self._bomb()
        return self.stream.read(size)

    def seek(self, at: int) -> int:
        if at > self.most + PIECE:
            raise self._bomb()
        return self.stream.seek(at)

    def tell(self) -> int:
        return self.stream.tell()

    def _bomb(self) -> CacheError:
        return CacheError(f"{self.source}: unpacks to far more than its size; nothing was imported")


def _ours(member: tarfile.TarInfo, folder: Path, source: Path) -> tarfile.TarInfo:
    """The member as it may be unpacked: a plan, or a file or folder of the compiler's."""
    member = tarfile.data_filter(member, str(folder))
    parts = PurePosixPath(member.name).parts
    compiled = parts[:1] == ("inductor",) and ".." not in parts
    if member.isdir():
        ours = compiled or parts in ((), ("plans",))
    else:
        plan = len(parts) == 2 and parts[0] == "plans" and fnmatchcase(parts[1], ENTRIES)
        ours = member.isfile() and (plan or (compiled and len(parts) > 1))
    if not ours:
        raise CacheError(f"{source}: holds {member.name!r}, which is none of a cache's; nothing was imported")
    return member


def _room(folder: Path, name: str, source: Path) -> None:
    """Nothing of another kind stands where this file is to be."""
    path = folder / name
    above = [parent for parent in path.parents if parent.is_relative_to(folder)]
    for taken in [*([path] if path.is_dir() else []), *(p for p in above if p.exists() and not p.is_dir())]:
        raise CacheError(f"{source}: {taken} is in the way of {name!r}; nothing was imported")
