"""A module whose activations are not kept for the backward: its forward runs again there, without a trace.

`module._compiled_call_impl` is the one place that torch leaves out of copies and pickles, so the call stands there, in
front of a compiled one. Inside a larger compiled graph it is not called: what is kept there is the compiler's to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_modules
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from plugins.core.step.second_run import FirstRun
from plugins.core.system import devices

Forward = Callable[..., Any]
PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)


@dataclass
class Savings:
    """Bytes of activations that are not kept, counted while `counting`: what is spared now, and at most at a time."""

    device: torch.device
    counting: bool = True
    now: int = 0
    most: int = 0

    def add(self, count: int) -> None:
        """A block's forward ran (above 0), or its second run is about to (below)."""
        self.now += count
        self.most = max(self.most, self.now)


class Block:
    """Modules that run one after the other, as one piece.

    Args:
        name: of the first, in its model.
        parts: the modules, without those inside them.
        start: the position of the first, where they are some of a Sequential's.
        savings: what all blocks of a run count into.
        warn: told why a block is not checkpointed, where that is so.

    Attributes:
        active: whether its forward runs again in the backward.
        saved: bytes of activations of a forward that are not kept.
        seconds: of a forward.
    """

    def __init__(
        self, name: str, parts: Sequence[nn.Module], start: int, savings: Savings, warn: Callable[[str, str], None]
    ) -> None:
        self.name, self.parts, self.start, self.savings, self.warn = name, parts, start, savings, warn
        self.active = True
        self.saved, self.seconds = 0, 0.0

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], hooks: bool = False) -> Any:
        """What `forward` returns.

        Args:
            forward: of the modules.
            args: positional arguments of the call.
            kwargs: those by name.
            hooks: whether `forward` calls the hooks of the parts themselves too.
        """
        leaves, spec = tree_flatten((args, kwargs))
        modules = [m for part in self.parts for m in part.modules()]
        if not self.active or not self._can(modules, leaves, hooks):
            return forward(*args, **kwargs)
        first = FirstRun(modules)

        def call(*given: Any) -> Any:
            args, kwargs = tree_unflatten(list(given), spec)
            return forward(*args, **kwargs)

        compiled = any(compiled_call(m) is not None for m in modules)
        with set_checkpoint_early_stop(False) if compiled else nullcontext():
            return checkpoint(
                call,
                *leaves,
                use_reentrant=False,
                context_fn=lambda: (self._measured(modules, leaves), self._again(first)),
            )

    def _can(self, modules: list[nn.Module], leaves: list[Any], hooks: bool) -> bool:
        """What a user wrote is not run twice: neither hooks, nor what fills an object that is handed in."""
        hooked = modules if hooks else [m for m in modules if m not in self.parts]
        if any(m._forward_hooks or m._forward_pre_hooks for m in hooked) or _everywhere():
            self.warn(self.name, "a forward hook stands on it, which would be called twice")
            return False
        odd = next((leaf for leaf in leaves if not isinstance(leaf, PLAIN)), None)
        if odd is not None:
            self.warn(self.name, f"it is given a {type(odd).__name__}, which a second run may change")
            return False
        return True

    @contextmanager
    def _again(self, first: FirstRun) -> Iterator[None]:
        self.savings.add(-self.saved)
        with first.again():
            yield

    @contextmanager
    def _measured(self, modules: list[nn.Module], leaves: list[Any]) -> Iterator[None]:
        """Bytes that would be kept, each block of memory once; what others hold anyway is not counted."""
        if not self.savings.counting:
            yield
            return
        held = [*leaves, *(t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))]
        known = {_memory(t) for t in held if isinstance(t, Tensor)}
        found: dict[int, int] = {}
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def note(tensor: Tensor) -> Any:
            if (memory := _memory(tensor)) not in known:
                found[memory] = tensor.untyped_storage().nbytes()
            return pack(tensor)

        devices.synchronize(self.savings.device)
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, unpack):
            yield
        devices.synchronize(self.savings.device)
        self.seconds, self.saved = time.perf_counter() - began, sum(found.values())
        self.savings.add(self.saved)


class CheckpointedModule:
    """One module whose calls in training are checkpointed, until `undo`.

    Args:
        module: stays the object it is.
        blocks: the module as one block; or, of a `Sequential`, runs of its children.
        training: whether the run is in training now.

    Attributes:
        inner: the compiled call in its place, where there is one.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[Block], training: Callable[[], bool]) -> None:
        self.module, self.blocks, self.training = module, blocks, training
        self.inner: Forward | None = None
        self._starts = {block.start: block for block in blocks}

    def install(self) -> None:
        """From now on the module's calls come here."""
        self.inner = vars(self.module).get("_compiled_call_impl")
        self.module._compiled_call_impl = self

    def undo(self) -> None:
        """The module is as it was, or compiled where that has come since."""
        take_off(self.module, self)
        if self.inner is not None:
            put(self.module, self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module, its hooks included."""
        plain = self.inner or self.module._call_impl
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and self.training()):
            return plain(*args, **kwargs)
        if self.inner is not None:
            return self.blocks[0].run(plain, args, kwargs, hooks=True) if self._whole else plain(*args, **kwargs)
        own = vars(self.module)
        before = {name: own[name] for name in ("forward",) if name in own}

        def put_back() -> None:
            own.pop("forward", None)
            own.update(before)

        def forward(*args: Any, **kwargs: Any) -> Any:
            put_back()
            if self._whole:
                return self.blocks[0].run(self.module.forward, args, kwargs)
            return self._in_turn(*args, **kwargs)

        own["forward"] = forward  # torch's own call runs the module's hooks around it, once
        try:
            return plain(*args, **kwargs)
        finally:
            put_back()

    @property
    def _whole(self) -> bool:
        return self.blocks[0].parts[0] is self.module

    def _in_turn(self, value: Any) -> Any:
        """A Sequential's forward, its runs of children each as one block."""
        children = list(self.module._modules.values())
        position = 0
        while position < len(children):
            block = self._starts.get(position)
            parts = [children[position]] if block is None else block.parts
            forward = partial(_chain, parts)
            value = forward(value) if block is None else block.run(forward, (value,), {}, hooks=True)
            position += len(parts)
        return value


def _chain(parts: Sequence[Any], value: Any) -> Any:
    for part in parts:
        value = part(value)
    return value


def put(module: nn.Module, call: Forward) -> None:
    """`module` is called through `call` from now on; a checkpointed call stays outside of it."""
    there = vars(module).get("_compiled_call_impl")
    if isinstance(there, CheckpointedModule):
        there.inner = call
    else:
        module._compiled_call_impl = call  # type: ignore[assignment]


def take_off(module: nn.Module, call: Forward) -> None:
    """Undoes `put`, where it still holds."""
    there = vars(module).get("_compiled_call_impl")
    if there is call:
        del module._compiled_call_impl
    elif isinstance(there, CheckpointedModule) and there.inner is call:
        there.inner = None


def compiled_call(module: nn.Module) -> Forward | None:
    """What stands on a module through `Module.compile` or `put`, a checkpointed call apart."""
    call = module._compiled_call_impl
    return call.inner if isinstance(call, CheckpointedModule) else call


def _everywhere() -> bool:
    """Hooks on all modules of the process."""
    return bool(of_modules._global_forward_hooks or of_modules._global_forward_pre_hooks)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
