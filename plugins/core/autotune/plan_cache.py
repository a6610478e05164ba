"""What earlier runs learnt, in one cache folder a project: plans by fingerprint, and the compiler's own cache.

An entry is a small JSON file, written atomically, so that two runs may share the folder. One of other versions has
another fingerprint and is never found; a damaged one is discarded with a warning. A folder that cannot be written
costs the memory of this run and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeInt, field_validator
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from plugins.config import AccelConfig
from plugins.core.autotune.background_compile import CompileFindings
from plugins.core.autotune.json_record import AnyPlan, Record
from plugins.core.checkpoint.atomic_file import write_atomically
from plugins.core.plan import Plan
from plugins.core.step.precision import bf16_is_fast
from plugins.core.system import devices
from plugins.errors import AccelError

SCHEMA = 2
LONGEST = 1e6  # s: of a step, or a compile; more is damage
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
MARKER = ".accel-plugins-cache"  # in a folder that was made for this alone
ENTRIES = "[0-9a-f]" * 64 + ".json"  # other files in `plans` are the user's own
CODE = (
    "fxgraph/*/*/*",
    "aotautograd/*/*",
    "*/*.so",
)  # the graphs, and what they load; all else is made of these, or not needed again


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/accel-plugins/<project>-<hash>`: one a project, outside of it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or _home_cache())
    here = Path.cwd().resolve()
    return root / "accel-plugins" / f"{here.name or 'root'}-{hashlib.sha256(str(here).encode()).hexdigest()[:8]}"


def _home_cache() -> Path:
    """`~/.cache`; without a home folder (a container's nameless user) one that is this user's alone."""
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        user = os.getuid()
    folder = Path(tempfile.gettempdir()) / f"cache-of-user-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid == user:  # compiled code is run: another user's is not
            return folder
    return Path(tempfile.mkdtemp(prefix=folder.name + "-"))


def fingerprint(model: nn.Module, shape: tuple[int, ...], device: torch.device, settings: Any) -> str:
    """Model structure, input shape, device, threads, versions, and the settings that bear on the plan."""
    # Two CPUs of one name may differ in what they are fast at, and a home folder may be shared between them.
    name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else devices.name(device)
    parts: list[Any] = [
        SCHEMA,
        [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()],
        [type(m).__qualname__ for m in model.modules()],
        shape,
        [device.type, name, bf16_is_fast(device), torch.get_num_threads()],
        [torch.__version__, torch.version.cuda],
        settings,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


class CacheError(AccelError):
    """A folder or a pack that is none of ours; the message is one line that names it."""


class CachedPlan(Record):
    """One run's plan and what it was chosen by; `code` are the compiled files that the plan needs."""

    schema_: int = Field(alias="schema", ge=SCHEMA, le=SCHEMA)
    key: str
    plan: AnyPlan
    tried: NonNegativeInt
    step_seconds: float = Field(gt=0, le=LONGEST)
    compile: CompileFindings
    code: list[str]
    device: str
    torch: str
    parameters: NonNegativeInt

    @field_validator("compile")
    @classmethod
    def _no_less_than_nothing(cls, findings: CompileFindings) -> CompileFindings:
        for name, value in findings.as_dict().items():
            if isinstance(value, float) and not 0 <= value <= LONGEST:
                raise ValueError(f"{name}={value}: not between 0 and {LONGEST:.0f}")
        return findings


@dataclass
class Entry:
    """One remembered plan, for `accel cache list`; `found` is None where it cannot be read."""

    path: Path
    found: CachedPlan | None

    @property
    def age_days(self) -> float:
        """Days since it was written."""
        return age_days(self.path)


def age_days(path: Path) -> float:
    """Days since a file was written; of a link, its own."""
    return (time.time() - path.lstat().st_mtime) / 86400


def _older(paths: Iterable[Path], days: float) -> list[Path]:
    return [path for path in paths if path.is_file() and age_days(path) >= days]


class PlanCache:
    """The plans of one cache folder. `warn` is told, once each, what could not be read or written."""

    for_compiler: str | None = None  # what this process set for the compiler: another run may set it anew

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.warn = Path(folder), warn
        self.plans, self.inductor = self.folder / "plans", self.folder / "inductor"
        self._told = False

    @classmethod
    def of(cls, config: AccelConfig, warn: Callable[[str], None]) -> PlanCache:
        """The folder that the settings name, for the compiler too where something may be compiled."""
        cache = cls(default_folder() if config.cache_dir == "auto" else Path(config.cache_dir), warn)
        if config.compile != "off":
            cache.use_for_compiler()
        return cache

    # -- a run's own ----------------------------------------------------------------------------------------------

    def use_for_compiler(self) -> None:
        """Keep the compiler's cache here too, unless the user set a folder; before the first compile."""
        # torch itself sets the variable, to its default, when it first asks for its cache.
        ours = (None, os.path.abspath(default_cache_dir()), PlanCache.for_compiler)  # noqa: PTH100
        if os.environ.get(INDUCTOR) in ours:
            os.environ.pop(INDUCTOR, None)
            if self.writable():
                os.environ[INDUCTOR] = PlanCache.for_compiler = str(self.inductor.absolute())

    def code(self) -> list[str]:
        """The compiled files that are here now: what a compiled plan needs, of this run or of others."""
        folder = Path(os.environ.get(INDUCTOR) or self.inductor)
        return sorted(path.relative_to(folder).as_posix() for pattern in CODE for path in folder.glob(pattern))

    def has_code(self, needed: Collection[str]) -> bool:
        """Whether all of it is still here: a plan with a part of its code would compile in the run, unbounded."""
        return bool(needed) and set(needed) <= set(self.code())

    def find(self, key: str, offered: Collection[Plan]) -> CachedPlan | None:
        """What was kept of this work, if its plan is among those that this run could choose."""
        path = self.plans / f"{key}.json"
        try:
            found = CachedPlan.read(path)
            if found.key != key:
                raise ValueError("it holds another entry")
            if found.plan not in offered:
                raise ValueError(f"its plan, {found.plan.name}, is none for this run")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            self._discard(path, error)
            return None
        return found

    def keep(self, key: str, data: dict[str, Any]) -> None:
        """Write the entry of this key; a folder that cannot be written is one warning."""
        text = json.dumps({"schema": SCHEMA, "key": key, **data}, indent=1)
        try:
            self.make()
            self.plans.mkdir(exist_ok=True)
            write_atomically(self.plans / f"{key}.json", lambda file: file.write(text.encode()))
        except OSError as error:
            self._tell(error.strerror or str(error))

    def make(self) -> None:
        """Make the folder, and mark one that was made for this: only such a one is ever cleared of code."""
        new = not self.folder.is_dir() or not any(self.folder.iterdir())
        self.folder.mkdir(parents=True, exist_ok=True)
        if new:
            (self.folder / MARKER).touch()

    def writable(self) -> bool:
        """Whether this run can remember; if not, that is said once."""
        try:
            self.make()
        except OSError as error:
            self._tell(error.strerror or str(error))
            return False
        if not os.access(self.folder, os.W_OK):
            self._tell("not writable")
            return False
        return True

    # -- the folder as a whole ------------------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """Every entry. To look is not to touch: a damaged one stays where it is."""
        for path in sorted(self.plans.glob(ENTRIES)):
            try:
                found = CachedPlan.read(path)
            except (OSError, ValueError):
                yield Entry(path, None)
            else:
                yield Entry(path, found if found.key == path.stem else None)

    def files(self) -> Iterator[Path]:
        """Plans and compiled code; nothing else that lies in the folder."""
        yield from (path for path in sorted(self.plans.glob(ENTRIES)) if path.is_file())
        for path in sorted(self.inductor.rglob("*")):
            if path.is_file() and path.suffix not in (".lock", ".tmp"):
                yield path

    def prune(self, older_than_days: float) -> tuple[int, int]:
        """Remove plans, and code that no plan left needs, not written for so long; returns how many files of each.

        Raises:
            CacheError: the folder was not made for this and holds no plan: what lies in it is not ours to remove.
            OSError
        """
        if not (self.folder / MARKER).is_file() and not any(entry.found for entry in self.entries()):
            raise CacheError(f"{self.folder}: no cache of accel; nothing was removed")
        plans = _older(self.plans.glob(ENTRIES), older_than_days)
        left = (entry.found for entry in self.entries() if entry.found and entry.path not in plans)
        needed = {self.inductor / name for found in left for name in found.code}
        code = [path for path in _older(self.inductor.rglob("*"), older_than_days) if path not in needed]
        for path in (*plans, *code):
            path.unlink(missing_ok=True)
        return len(plans), len(code)

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            self.warn(f"cache folder {self.folder}: {why}; what this run learns is not remembered")

    def _discard(self, path: Path, error: Exception) -> None:
        try:
            path.unlink(missing_ok=True)
            how = "discarded"
        except OSError:
            how = "left aside"  # a folder in its place, or one that cannot be written
        why = getattr(error, "strerror", None) or error
        self.warn(f"cache entry {path}: damaged ({why}); {how}, measuring anew")
