"""Compile beside the running training: a worker process that fills the compiler's cache.

The worker gets the modules and, for their inputs, shapes and kinds only. It runs each once, forward and backward,
through the same in-place compile as the run will; the run then finds the code in the cache. A worker that hangs,
crashes or outlives its budget is ended, and costs the run nothing but the time of a core.

    python -m plugins.core.precompile JOB        # what the run starts by itself
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plugins.core.shapes import Marker


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


class Captured:
    """Notes how modules are called while it is entered: one entry a distinct kind of call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.calls: list[tuple[nn.Module, Any, Any]] = []
        self._seen: set[str] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> Captured:
        for module in self.modules:
            self._hooks.append(module.register_forward_pre_hook(self._note, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        structure = [(n, tuple(p.shape)) for n, p in module.named_parameters()]
        sign = repr((type(module), structure, kinds(args), kinds(kwargs)))
        if sign not in self._seen:
            self._seen.add(sign)
            self.calls.append((module, kinds(args), kinds(kwargs)))


class Worker:
    """One compile under way in another process. `poll` says how it stands; `stop` ends it.

    Raises:
        Exception: whatever pickling raised: the model cannot be handed to another process.
    """

    def __init__(
        self,
        calls: list[tuple[nn.Module, Any, Any]],
        arguments: dict[str, Any],
        dims: Sequence[int],
        autocast: tuple[str, torch.dtype] | None,
        budget_seconds: float,
    ) -> None:
        job = {
            "calls": calls,
            "arguments": arguments,
            "dims": tuple(dims),
            "autocast": autocast,
            "threads": torch.get_num_threads(),
        }
        handle, name = tempfile.mkstemp(prefix="accel-compile-", suffix=".job")
        self.path = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump(job, file)
        except BaseException:
            self.path.unlink(missing_ok=True)
            raise
        self.began = time.monotonic()
        self.budget = budget_seconds
        path = os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [*command(), str(self.path)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

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
            return f"the compile outlived its budget of {self.budget:.0f} s"
        self.path.unlink(missing_ok=True)
        if code == 0:
            return "ready"
        text = self.process.stderr.read().decode(errors="replace").strip() if self.process.stderr else ""
        last = text.splitlines()[-1] if text else f"exit code {code}"
        return f"the compile worker failed: {last[:200]}"

    def stop(self) -> None:
        """End the worker and the compilers that it started."""
        if self.process.poll() is None:
            try:
                os.killpg(self.process.pid, 9)
            except (OSError, AttributeError):
                self.process.kill()
            self.process.wait()
        self.path.unlink(missing_ok=True)


def command() -> list[str]:
    """How a worker is started; tests put a stand-in here."""
    return [sys.executable, "-m", "plugins.core.precompile"]


def run(job: dict[str, Any]) -> None:
    """In the worker: compile every call of the job, forward and backward."""
    from contextlib import nullcontext

    from plugins.core.compile import InPlace

    torch.set_num_threads(job["threads"])
    for module, args, kwargs in job["calls"]:
        module.train()
        failed: list[str] = []
        part = InPlace(module, **job["arguments"], marker=Marker(job["dims"]), give_up=failed.append)
        part.install()
        device, dtype = job["autocast"] or ("cpu", torch.float32)
        with torch.autocast(device, dtype=dtype) if job["autocast"] else nullcontext():
            output = module(*made(args), **made(kwargs))
        if failed:
            raise RuntimeError(failed[0])
        losses = [t.float().sum() for t in _floating(output) if t.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        part.undo()


def _floating(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _floating(item)] if isinstance(value, (list, tuple)) else []


def main() -> None:
    # The job comes from the process that started this one, and holds code by its nature: modules to compile.
    with Path(sys.argv[1]).open("rb") as file:
        run(pickle.load(file))


if __name__ == "__main__":
    main()
