"""Compile in place, outside autocast, with a way back.

`module._compiled_call_impl` is what `Module.compile()` sets: keys, class, `isinstance`, deepcopy and pickles stay the
host's own. Ours wraps it, because marks must be put on outside the compiled region, an error from any part of the
compiler must end in an eager run and not in a dead one, and a budget of graphs must hold.
"""

from __future__ import annotations

import copyreg
import logging
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch._dynamo.callback as compile_callbacks
from torch import nn
from torch._dynamo.exc import UserError, UserErrorType
from torch._inductor import list_mode_options
from torch._inductor.exc import CppCompileError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from plugins.core.compile.decision import CompileOutcome, CompileResult
from plugins.core.compile.dynamic_shapes import Marker
from plugins.core.step.batchnorm import Statistics
from plugins.core.step.checkpointed_module import put, take_off
from plugins.core.system import devices, memory, versions
from plugins.errors import AccelError

TRUSTED_CPU = "cpp.vec_isa_ok"
ADVICE = ("Set TORCH", "For even more developer context", "You can suppress")
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")

PASSING = (OSError, MemoryError, torch.OutOfMemoryError, CppCompileError, BrokenExecutor)  # errors that may be mended


class CompileRefused(AccelError):
    """Compile was asked where it cannot be right; the message is the reason."""


GiveUp = Callable[[CompileOutcome], None]


class CompiledModule:
    """One module whose calls go through torch.compile, until an error or `undo`.

    Args:
        module: stays the object it is.
        takes: which calls to compile; others run eagerly (a host may call the same module with a dict).
        marker: marks the varying dimension before each call.
        limit: graphs that torch may keep for this module.
        isolate: give the module a graph cache of its own (whole models); identical blocks share one instead.
        give_up: told why, once, when the module goes back to eager.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        backend: str | Callable[..., Any] = "inductor",
        mode: str = "default",
        dynamic: bool | None = None,
        limit: int = 8,
        isolate: bool = True,
        marker: Marker | None = None,
        takes: Callable[[tuple[Any, ...]], bool] = lambda args: True,
        give_up: GiveUp = lambda fault: None,
    ) -> None:
        refuse_inside_autocast()
        self.module, self.marker, self.takes, self.give_up = module, marker or Marker(), takes, give_up
        self._arguments: dict[str, Any] = {
            "backend": backend,
            "dynamic": dynamic,
            "limit": limit,
            "isolate": isolate,
        }
        if backend == "inductor":
            # Trusting the CPU's own flags saves four test builds, 5 s of the first compile in a cache folder.
            self._arguments["options"] = {**list_mode_options(mode), TRUSTED_CPU: True}
        self.active = False
        self._statistics = Statistics(module)
        self._breaks = False  # a call of several graphs: one may have run when the next one's compile fails
        self._compiled: Callable[..., Any] = self._build()

    def install(self) -> None:
        """From now on the module's calls come here."""
        put(self.module, self)
        self.active = True

    def undo(self) -> None:
        """Back to eager; the module is as it was."""
        take_off(self.module, self)
        self.active = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled code; eagerly where that is off, does not take these arguments, or failed."""
        if not self.active or not self.takes(args):
            return self.module._call_impl(*args, **kwargs)
        while True:
            self.marker.mark(*args, **kwargs)
            try:
                with self._statistics_kept(), _compile_settings(quiet=self.marker.way == "strict"):
                    return self._compiled(*args, **kwargs)
            except Exception as error:
                if memory.is_out_of_memory(error):  # the host's to handle: it may retry with a smaller batch
                    raise getattr(error, "inner_exception", None) or error from None
                if _is_about_marks(error) and self.marker.relax():
                    self.marker.clear(*args, **kwargs)
                    if self.marker.way == "static":
                        self._arguments["dynamic"] = False
                    self._compiled = self._build()
                    continue
                if is_of(error, CppCompileError) and self._arguments["options"].pop(TRUSTED_CPU, 0):
                    self._compiled = self._build()  # a compiler too old for this CPU: let torch find out what it can
                    continue
                self.undo()
                self.give_up(failure(error))
                # A mistake that is not the compiler's comes again here, as the host's own error.
                return self.module._call_impl(*args, **kwargs)

    @contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """A call that fails is made again: BatchNorm's statistics, which a graph of it moved, go back first.

        They are kept as a call's first compile starts, before any of its graphs has run, and before every call of a
        module whose calls are several graphs.
        """
        compiles = 0

        def started(*_: object) -> None:
            nonlocal compiles
            compiles += 1
            if compiles == 1 and not self._breaks:
                self._statistics.keep()

        if self._breaks:
            self._statistics.keep()
        callbacks = compile_callbacks.callback_handler.start_callbacks
        callbacks.append(started)
        try:
            yield
        except Exception:
            if compiles or self._breaks:
                self._statistics.restore()
            raise
        finally:
            if started in callbacks:  # a reset of dynamo clears them
                callbacks.remove(started)
            self._breaks = self._breaks or compiles > 1

    def _build(self) -> Callable[..., Any]:
        return versions.compiled(self.module._call_impl, **self._arguments)


def refuse_inside_autocast() -> None:
    """torch.compile called while autocast is active bakes the casts in and gave NaN: refuse with the reason."""
    if device := devices.in_autocast():
        raise CompileRefused(
            f"compile was asked inside an active autocast ({device}): compile first, then call inside autocast"
        )


def check_backend(name: str) -> None:
    """Raises CompileRefused on a backend that torch does not know."""
    if name == "inductor":
        return
    known = torch._dynamo.list_backends(exclude_tags=())
    if name not in known:
        raise CompileRefused(f"compile_backend={name}: allowed are {', '.join(sorted(known))}")


def preallocate_gradients(model: nn.Module) -> None:
    """Give every trainable parameter a zeroed gradient outside capture.

    A gradient allocated inside a CUDA graph's pool is overwritten by the next replay, which loses an accumulated
    window; one that exists before is added to in place. Keep it with `zero_grad(set_to_none=False)`.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def _compile_settings(quiet: bool) -> Iterator[None]:
    """Settings of a lazy compile."""
    with (
        versions.backward_settings(),
        _same_cache_keys(),
        _without_log("torch._guards") if quiet else nullcontext(),
    ):
        yield


@contextmanager
def _same_cache_keys() -> Iterator[None]:
    """The compiler's cache keys are the same in every process.

    They are hashes of pickles, and a memory format is pickled by the name of the first imported module that holds
    `torch`: another one where imports came in another order, as in a worker. Here it goes by its own name.
    """
    table, kind = copyreg.dispatch_table, torch.memory_format
    before = table.get(kind)
    table[kind] = _memory_format_name
    try:
        yield
    finally:
        table.pop(kind, None)
        if before is not None:
            table[kind] = before


def _memory_format_name(memory_format: torch.memory_format) -> str:
    return str(memory_format).removeprefix("torch.")


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """A strict mark that fails prints a page of stack; the fall to the next way is our own line to tell."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _is_about_marks(error: BaseException | None) -> bool:
    """A dimension that was marked as varying was made a constant."""
    while error is not None:
        if isinstance(error, ConstraintViolationError):
            return True
        if isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION:
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def is_of(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    """Whether the error is of one of these kinds, or the one that the compiler wrapped in it is."""
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def failure(error: Exception) -> CompileOutcome:
    """What an error of the compiler comes to.

    Another compile of the same code fails so again, unless it was a full disk, a broken C++ compiler, a lack of memory
    or a process that was ended.
    """
    return CompileOutcome(CompileResult.FAILED, first_line(error), retryable=is_of(error, *PASSING))


def first_line(error: Exception) -> str:
    """An error's kind and what it says first, in one line of whole words, without torch's advice on logs."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(ADVICE)]
    return textwrap.shorten(f"{type(error).__name__}: {' '.join(lines[:2])}", 300, placeholder=" …")
