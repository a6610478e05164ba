"""Checkpoints of the host: written whole or not at all, with the state that the host leaves out beside them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from ultralytics.engine import trainer as host
from ultralytics.utils import LOGGER, RANK

from integrations.contract import Session
from integrations.patches import Patches


class Saving:
    """Holds `save_model` and `final_eval` of one trainer."""

    def __init__(self, trainer: Any, session: Session, patches: Patches, state: Callable[[], dict[str, Any]]) -> None:
        self.trainer, self.session, self.state = trainer, session, state
        atomic = session.files.AtomicPath
        last = atomic(trainer.last)
        last.around = self._with_extra_state
        patches.put(trainer, "last", last)
        patches.put(trainer, "best", atomic(trainer.best))
        patches.put(trainer, "wdir", atomic(trainer.wdir))
        self._extra_written = False  # by this save
        self.around = patches.around(trainer, "save_model", self.save_model)
        self._final_eval = patches.put(trainer, "final_eval", self.final_eval)
        if trainer.wdir.exists():
            session.files.sweep(trainer.wdir)

    def save_model(self, inner: Callable[[], Any]) -> bool:
        """The host's own save, or the user's. A full disk costs this checkpoint, never the run or the one before it."""
        last, self._extra_written = self.trainer.last, False
        before = _stamp(last)
        try:
            saved = bool(inner())
            if not self._extra_written and _stamp(last) != before:  # a user's, which does not go by `write_bytes`
                with self._with_extra_state(last, memoryview(last.read_bytes())):
                    pass
        except OSError as error:
            self.session.warn(f"checkpoint not written: {error}; the one before it is untouched and training goes on")
            return False
        for path in (self.trainer.last, self.trainer.best):
            if path.exists() and str(path) not in self.session.report.checkpoints:
                self.session.report.checkpoints.append(str(path))
        return saved

    @contextmanager
    def _with_extra_state(self, path: Path, data: memoryview) -> Iterator[None]:
        """The extra state first, under a name of its own, then the checkpoint, then the old extra state goes."""
        extra = None
        try:
            extra = self.session.files.save_sidecar(path, data, self.state())
            self._extra_written = True
        except OSError as error:
            self.session.warn(f"extra state not written: {error}; a resume would continue from the averaged weights")
        yield
        if extra is not None:
            self.session.files.drop_sidecars(path, keep=extra)

    def final_eval(self) -> Any:
        """The host's last validation, with an atomic `strip_optimizer` in it."""
        scoped = Patches()
        strip = scoped.put(host, "strip_optimizer", None)
        host.strip_optimizer = _atomic_strip(strip, self.session)
        try:
            with self.session.validation():
                return self._final_eval()
        finally:
            scoped.undo()
            self.session.files.drop_sidecars(self.trainer.last)


def _stamp(path: Path) -> Any:
    """What changes when the file is written."""
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


def _atomic_strip(strip: Callable[..., dict[str, Any]], session: Session) -> Callable[..., dict[str, Any]]:
    """`strip_optimizer` on a copy, which then takes the file's place."""

    def strip_atomically(f: str | Path = "best.pt", s: str = "", updates: Any = None) -> dict[str, Any]:
        target = Path(s or f)
        stripped: dict[str, Any] = {}
        try:
            with tempfile.TemporaryDirectory(prefix=".strip-", dir=target.parent) as folder:
                copy = Path(folder) / target.name
                shutil.copyfile(f, copy)
                with _silent():  # it would name the copy
                    stripped = strip(copy, updates=updates)
                if not stripped:
                    LOGGER.warning(f"Skipping {f}, not a valid Ultralytics model")
                    return stripped
                data = copy.read_bytes()
            session.files.AtomicPath(target).write_bytes(data)
        except OSError as error:
            session.warn(f"optimizer not stripped from {target}: {error}; the file is whole, with its optimizer")
            return stripped
        LOGGER.info(f"Optimizer stripped from {target}, {len(data) / 1e6:.1f}MB")
        return stripped

    return strip_atomically


@contextmanager
def _silent() -> Iterator[None]:
    before, LOGGER.disabled = LOGGER.disabled, True
    try:
        yield
    finally:
        LOGGER.disabled = before


def find_state(trainer: Any, files: Any) -> dict[str, Any] | None:
    """The extra state beside the checkpoint that this trainer resumes from."""
    if not trainer.resume:
        return None
    source = Path(str(trainer.args.resume if isinstance(trainer.args.resume, (str, Path)) else trainer.args.model))
    found: dict[str, Any] | None = files.load_sidecar(source) if source.is_file() else None
    return found


def divided(state: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra state, in what can be put back now and what only as the first epoch begins.

    Late are the gradients of an open window, which the host zeroes before, and the tensors of modules that users'
    callbacks will put on the model (a teacher, an adapter, a criterion).
    """
    here = model.state_dict().keys()
    late = {name: tensor for name, tensor in state["model"].items() if name not in here}
    now = {name: tensor for name, tensor in state["model"].items() if name in here}
    return {**state, "model": now, "gradients": {}}, {"model": late, "gradients": state.get("gradients", {})}


@torch.no_grad()
def put_late(model: nn.Module, late: Mapping[str, Any]) -> list[str]:
    """Put back what `divided` left for the first epoch; returns names that the model has no place for."""
    live, parameters = model.state_dict(), dict(model.named_parameters())
    lost = [name for name, tensor in late["model"].items() if name not in live or live[name].shape != tensor.shape]
    for name in late["model"].keys() - set(lost):
        live[name].copy_(late["model"][name])
    for name in late["gradients"].keys() & parameters.keys():
        parameters[name].grad = late["gradients"][name].to(parameters[name].device)
    return lost


def writes_report() -> bool:
    """One process of a run writes: the only one, or rank 0."""
    return RANK in {-1, 0}
