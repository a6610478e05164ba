"""What earlier runs learnt, in one cache folder a project: plans by fingerprint, and the compiler's own cache.

An entry is a small JSON file, written atomically, so that two runs may share the folder. One of other versions has
another fingerprint and is never found; a damaged one is discarded with a warning. A folder that cannot be written
costs the memory of this run and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from plugins.core.checkpoint import write_atomically

SCHEMA = 1
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/accel-plugins/<project>-<hash>`: one a project, outside of it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    here = Path.cwd().resolve()
    return root / "accel-plugins" / f"{here.name or 'root'}-{hashlib.sha256(str(here).encode()).hexdigest()[:8]}"


def fingerprint(model: nn.Module, shape: tuple[int, ...], device: torch.device, settings: Any) -> str:
    """Model structure, input shape, device, threads, versions, and the settings that bear on the plan."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parts: list[Any] = [
        SCHEMA,
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()],
        [type(m).__qualname__ for m in model.modules()],
        shape,
        [device.type, name, torch.get_num_threads()],
        [torch.__version__, torch.version.cuda],
        settings,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class CacheError(ValueError):
    """A pack that is none or not safe; the message is one line that names it."""


@dataclass
class Entry:
    """One remembered plan, for `accel cache list`."""

    path: Path
    data: dict[str, Any]

    @property
    def age_days(self) -> float:
        return age_days(self.path)


def age_days(path: Path) -> float:
    return (time.time() - path.stat().st_mtime) / 86400


def _older(paths: Iterable[Path], days: float) -> list[Path]:
    return [path for path in paths if path.is_file() and age_days(path) >= days]


class Memory:
    """The plans of one cache folder. `warn` is told, once each, what could not be read or written."""

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.warn = Path(folder), warn
        self.plans = self.folder / "plans"

    def use_for_compiler(self) -> None:
        """Keep the compiler's cache here too, unless the user set a folder; before the first compile."""
        # torch itself sets the variable, to its default, when it first asks for its cache.
        if os.environ.get(INDUCTOR) in (None, os.path.abspath(default_cache_dir())) and self._writable():  # noqa: PTH100
            os.environ[INDUCTOR] = str(self.folder.absolute() / "inductor")

    def has_code(self) -> bool:
        """Whether the compiler's cache holds anything."""
        folder = Path(os.environ.get(INDUCTOR) or self.folder / "inductor")
        return any(folder.glob("fxgraph/*/*"))

    def find(self, key: str) -> dict[str, Any] | None:
        path = self._path(key)
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            self._discard(path, error)
            return None
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                return None  # of another release
            if data["key"] != key:
                raise ValueError("it holds another entry")
        except (ValueError, KeyError, TypeError) as error:
            self._discard(path, error)
            return None
        return dict(data)

    def keep(self, key: str, data: dict[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, "key": key, **data}, indent=1)
        try:
            self.plans.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(key), lambda file: file.write(text.encode()))
        except OSError as error:
            self.warn(f"cache folder {self.folder}: {error.strerror or error}; what this run learnt is not remembered")

    def entries(self) -> Iterator[Entry]:
        for path in sorted(self.plans.glob("*.json")) if self.plans.is_dir() else ():
            data = self.find(path.stem)
            if data is not None:
                yield Entry(path, data)

    def prune(self, older_than_days: float) -> tuple[int, int]:
        """Remove plans and compiled code that were not written for so long; returns how many files of each."""
        plans = _older(self.plans.glob("*.json"), older_than_days)
        code = _older((self.folder / "inductor").rglob("*"), older_than_days)
        for path in (*plans, *code):
            path.unlink(missing_ok=True)
        return len(plans), len(code)

    def export(self, target: Path) -> int:
        """Pack plans and compiled code into one .tar.gz, to warm another machine; returns the files in it."""
        files = [p for p in sorted(self.folder.rglob("*")) if p.is_file() and not p.name.endswith((".lock", ".tmp"))]
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as pack:
            for path in files:
                pack.add(path, arcname=str(path.relative_to(self.folder)))
        write_atomically(target, lambda file: file.write(buffer.getbuffer()))
        return len(files)

    def load(self, source: Path) -> int:
        """Unpack what `export` packed; returns the files. Compiled code runs: import only packs that you trust.

        Raises:
            CacheError: no pack, or one that holds more than plain files inside of the folder; nothing is written then.
        """
        try:
            with tarfile.open(source, mode="r:gz") as pack:
                members = pack.getmembers()
                for member in members:
                    tarfile.data_filter(member, str(self.folder))
                    if not (member.isfile() or member.isdir()):
                        raise CacheError(f"{source}: holds {member.name}, which is no plain file; nothing was imported")
                self.folder.mkdir(parents=True, exist_ok=True)
                pack.extractall(self.folder, members=members, filter="data")
        except tarfile.FilterError as error:
            raise CacheError(f"{source}: {error}; nothing was imported") from None
        except (tarfile.TarError, EOFError, OSError) as error:
            raise CacheError(f"{source}: cannot be imported: {str(error).splitlines()[0]}") from None
        return sum(member.isfile() for member in members)

    def _path(self, key: str) -> Path:
        return self.plans / f"{key}.json"

    def _writable(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)

    def _discard(self, path: Path, error: Exception) -> None:
        self.warn(f"cache entry {path}: damaged ({type(error).__name__}: {error}); discarded")
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
