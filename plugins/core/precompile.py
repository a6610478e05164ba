"""Compile beside the running training: a worker process that fills the compiler's cache.

The worker gets the modules and, for their inputs, shapes and kinds only. It runs each once, forward and backward,
through the same in-place compile as the run will; the run then finds the code in the cache. A worker that hangs,
crashes or outlives its budget is ended, and costs the run nothing but the time of a core.

    python -m plugins.core.precompile JOB        # what the run starts by itself
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
from torch import Tensor, nn

from plugins.core.compile import InPlace, first_line
from plugins.core.shapes import Marker
from plugins.core.toolchain import end_group

PREFIX = "accel-compile-"  # of a worker's folder; the run's process id follows


@dataclass(frozen=True)
class Like:
    """A tensor's kind, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), bool(tensor.requires_grad))

    def make(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        return made.requires_grad_(self.requires_grad)


def kinds(value: Any) -> Any:
    """A call's arguments with every tensor replaced by its kind."""
    if isinstance(value, Tensor):
        return Like.of(value)
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(kinds(item) for item in value)
    return value


def made(value: Any) -> Any:
    """The opposite of `kinds`."""
    if isinstance(value, Like):
        return value.make()
    if isinstance(value, dict):
        return {key: made(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(made(item) for item in value)
    return value


@dataclass(frozen=True)
class Call:
    """One kind of call of a module: kinds of its arguments, and the autocast that it is made in."""

    module: nn.Module
    args: Any
    kwargs: Any
    autocast: tuple[str, torch.dtype] | None


class Captured:
    """Notes how modules are called while it is entered, one entry a distinct kind of call.

    It stands where a compiled call will stand, so that what it sees is what will be compiled.
    """

    def __init__(self, modules: Sequence[nn.Module], takes: Callable[[tuple[Any, ...]], bool] = lambda args: True):
        self.modules, self.takes = modules, takes
        self.calls: list[Call] = []
        self._seen: set[str] = set()

    def __enter__(self) -> Captured:
        for module in self.modules:
            module._compiled_call_impl = partial(self._note, module)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module._compiled_call_impl

    def _note(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.takes(args):
            call = Call(module, kinds(args), kinds(kwargs), _autocast((*args, *kwargs.values())))
            structure = [(n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()]
            sign = repr((type(module), structure, call.args, call.kwargs, call.autocast))
            if sign not in self._seen:
                self._seen.add(sign)
                self.calls.append(call)
        return module._call_impl(*args, **kwargs)


class Worker:
    """One compile under way in another process, of every call in each of `ways`: how it is compiled.

    `poll` says how it stands; `stop` ends it.

    Raises:
        Exception: whatever pickling raised: the model cannot be handed to another process.
    """

    def __init__(
        self, calls: Sequence[Call], ways: Sequence[dict[str, Any]], dims: Sequence[int], budget_seconds: float
    ) -> None:
        job = {
            "calls": list(calls),
            "ways": list(ways),
            "dims": tuple(dims),
            "threads": torch.get_num_threads(),
            "parent": os.getpid(),
            "seconds": 2 * budget_seconds,
        }
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self.began, self.budget = time.monotonic(), budget_seconds
        try:
            with (self.folder / "job").open("wb") as file:
                cloudpickle.dump(job, file)  # a script's own classes too, which another process cannot import
            path = os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")])
            with (self.folder / "errors").open("wb") as errors:
                self.process = subprocess.Popen(
                    [*command(), str(self.folder / "job")],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        # Also where nobody calls it: at Ctrl-C, at the interpreter's end, and once an interrupted cell is forgotten.
        self.stop = weakref.finalize(self, _stop, os.getpid(), self.process, self.folder)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def poll(self) -> str:
        """`running`, `ready`, or why it will not be ready."""
        code = self.process.poll()
        if code is None:
            if self.seconds <= self.budget:
                return "running"
            self.stop()
            return f"it outlived its budget of {self.budget:.0f} s"
        text = self._errors()
        self.stop()
        if code == 0:
            return "ready"
        if code < 0:
            return f"its worker was killed (signal {-code})"
        return f"its worker failed: {text}" if text else "its worker failed without a word"

    def _errors(self) -> str:
        """The last line that the worker wrote."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
            return textwrap.shorten(lines[-1], 300, placeholder=" …") if lines else ""
        return ""


def _stop(owner: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """End the worker and the compilers that it started; a fork of the run, such as a loader's, leaves them alone."""
    if os.getpid() == owner:
        end_group(process)
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove folders of this user's runs that were killed together with their workers."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):  # another run sweeps too
            # A worker that outlived its run ends itself within a second, and needs its folder no more.
            if path.lstat().st_uid == os.getuid() and owner.isdecimal() and not psutil.pid_exists(int(owner)):
                shutil.rmtree(path, ignore_errors=True)


def command() -> list[str]:
    """How a worker is started; tests put a stand-in here."""
    return [sys.executable, "-m", "plugins.core.precompile"]


def run(job: dict[str, Any]) -> None:
    """In the worker: compile every call of the job in every way, forward and backward."""
    torch.set_num_threads(job["threads"])
    for way, call in product(job["ways"], job["calls"]):
        failed: list[str] = []
        part = InPlace(call.module, **way, marker=Marker(job["dims"]), give_up=failed.append)
        part.install()
        with torch.autocast(call.autocast[0], dtype=call.autocast[1]) if call.autocast else nullcontext():
            output = call.module(*made(call.args), **made(call.kwargs))
        if failed:
            sys.exit(failed[0])
        losses = [t.float().sum() for t in _floating(output) if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        part.undo()


def _autocast(values: tuple[Any, ...]) -> tuple[str, torch.dtype] | None:
    """The autocast in force for the device of the first tensor."""
    device = next((t.device.type for t in values if isinstance(t, Tensor)), "cpu")
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _floating(item)] if isinstance(value, (list, tuple)) else []


def _die_with(parent: int, seconds: float, folder: Path) -> None:
    """End this process, its compilers and its folder when the run is gone, or forgot it."""
    until = time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    # The job comes from the process that started this one, and holds code by its nature: modules to compile.
    path = Path(sys.argv[1])
    try:
        with path.open("rb") as file:
            job = pickle.load(file)
        watch = (job["parent"], job["seconds"], path.parent)
        threading.Thread(target=_die_with, args=watch, daemon=True).start()
        run(job)
    except Exception as error:
        sys.exit(first_line(error))  # the last line on stderr is what the run shows


if __name__ == "__main__":
    from plugins.core import precompile  # whose classes the job names; this copy of them is another

    precompile.main()
