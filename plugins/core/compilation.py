"""What of one run is compiled: the scope, the budget of graphs, and the way back to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import Any

import torch
from torch import nn

from plugins.config import AccelConfig
from plugins.core import compile as compiling
from plugins.core import memory
from plugins.core import plan as planning
from plugins.core.plan import Plan
from plugins.core.report import CompileFacts
from plugins.core.shapes import Marker
from plugins.core.toolchain import missing_compiler
from plugins.core.watch import Watch, show_progress

Takes = Callable[[tuple[Any, ...]], bool]
GiveUp = Callable[[str], None]
STARTS_EAGER = "compile=auto starts eager"
OWNED = "the model is compiled already, by its owner"


@dataclass
class Code:
    """Compiled calls that may stand on a model. Without parts it is eager."""

    parts: list[compiling.InPlace] = field(default_factory=list)
    scope: str = "eager"
    mode: str = "default"


class Compilation:
    """Installs compiled calls on a model by the settings, and holds them to `recompile_budget`.

    Attributes:
        code: the compiled calls in force, or those that were until they failed.
        spared: graphs of code that lost its trial: they count towards no budget.
        compiled_at: updates at which graphs appeared, one entry a graph.
    """

    def __init__(
        self,
        config: AccelConfig,
        model: nn.Module,
        device: torch.device,
        facts: CompileFacts,
        warn: Callable[[str], None],
        dims: Iterable[int] = (),
        takes: Takes = lambda args: True,
        impossible: str = "",
    ) -> None:
        self.config, self.model, self.device, self.facts, self.warn = config, model, device, facts, warn
        self.dims, self.takes = tuple(dims), takes
        self._impossible = impossible
        self.code = Code()
        self.spared = 0
        self.compiled_at: list[int] = []
        self._validated: list[compiling.InPlace] = []
        self.watch = Watch(show_progress)
        facts.budget, facts.mode = config.recompile_budget, config.compile_mode
        self.watch.start()

    @property
    def impossible(self) -> str:
        """Why nothing can be compiled here, or empty."""
        return self._impossible or (OWNED if self.owned else self._no_compiler)

    @property
    def owned(self) -> bool:
        """Whether the model's owner compiled it, or a part of it: that stays as it is."""
        return any(
            isinstance(m, torch._dynamo.OptimizedModule)
            or not isinstance(m._compiled_call_impl, (compiling.InPlace, NoneType))
            for m in self.model.modules()
        )

    @cached_property
    def _no_compiler(self) -> str:
        """Looking for a compiler takes a second: only when it is needed."""
        return missing_compiler(self.device, self.config.compile_backend)

    @property
    def parts(self) -> list[compiling.InPlace]:
        return self.code.parts

    @property
    def active(self) -> bool:
        return any(part.active for part in self.parts)

    @property
    def cuda_graphs(self) -> bool:
        """Whether code with CUDA graphs is in force: gradients are then zeroed in place, and never dropped."""
        wanted = self.active and self.code.mode in compiling.CUDA_GRAPH_MODES
        return wanted and planning.has_cuda_graphs(self.device, self.config.compile_backend)

    @property
    def may_use_cuda_graphs(self) -> bool:
        """Whether a plan may have them here, room for them apart."""
        return planning.may_use_cuda_graphs(self.device, self.config, self.dims)

    def mode(self, cuda_graphs: bool) -> str:
        """What the user chose, or a plan."""
        return "reduce-overhead" if cuda_graphs else self.config.compile_mode

    def arguments(self, scope: str, cuda_graphs: bool = False) -> dict[str, Any]:
        """How a module is compiled; the same in a worker that fills the cache."""
        return {
            "backend": self.config.compile_backend,
            "mode": self.mode(cuda_graphs),
            "dynamic": False if self.config.dynamic == "static" else None,
            # Blocks share torch's count of graphs with the code that they are tried against.
            "limit": self.config.recompile_budget * (1 + self.may_use_cuda_graphs),
            "isolate": scope == "whole",
        }

    def start(self) -> None:
        """At the start of the run: compile where `compile=on` asks for it.

        Raises:
            CompileRefused: asked where it cannot be right; the message is the reason.
        """
        if self.config.compile == "off":
            self.facts.reason = "compile=off"
            return
        compiling.check_backend(self.config.compile_backend)
        modules, scope = self.modules()
        if self.config.compile == "auto":
            self.facts.reason = OWNED if self.owned else STARTS_EAGER
        elif self.impossible:
            self.stay_eager(self.impossible)
        else:
            self.put(self.build(modules, scope))
            self.facts.reason = "compile=on"

    def build(
        self, modules: list[nn.Module], scope: str, cuda_graphs: bool = False, give_up: GiveUp | None = None
    ) -> Code:
        """Compiled calls of these modules, to be `put`; `give_up` is told of an error instead of the run."""
        way = "static" if self.config.dynamic == "static" else "strict"
        parts = [
            compiling.InPlace(
                module,
                **self.arguments(scope, cuda_graphs),
                marker=Marker(self.dims, way),
                takes=self.takes,
                give_up=give_up or self.stay_eager,
            )
            for module in modules
        ]
        return Code(parts, scope, self.mode(cuda_graphs))

    def put(self, code: Code) -> None:
        """This code runs from now on, and no other."""
        for part in self.parts:
            part.undo()
        for part in code.parts:
            part.install()
        self.code, self.facts.decision, self.facts.mode = code, code.scope, code.mode
        self.preallocate()

    def preallocate(self) -> None:
        """Gradients that CUDA graphs may add to, where such run."""
        if self.cuda_graphs:
            compiling.preallocate_gradients(self.model)

    def run(self, plan: Plan) -> Plan:
        """Put the code of a plan; returns the plan, without its CUDA graphs or its compile where they cannot be."""
        if plan.cuda_graphs and not (self.may_use_cuda_graphs and memory.room_for_cuda_graphs(self.device)):
            why = "do not fit into memory" if self.may_use_cuda_graphs else "cannot run here with these settings"
            self.warn(f"plan {plan.name}: CUDA graphs {why}; the run goes on without them")
            plan = replace(plan, cuda_graphs=False)
        self.undo()
        if plan.compile == "eager":
            return plan
        try:
            if self.impossible:
                raise compiling.CompileRefused(self.impossible)
            self.put(self.build(*self.modules(plan.compile), plan.cuda_graphs))
        except compiling.CompileRefused as error:
            self.stay_eager(str(error))
            return plan.eager
        return plan

    def undo(self) -> None:
        """Back to eager."""
        self.put(Code(mode=self.config.compile_mode))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls run eagerly inside, and add no graph."""
        held = [part for part in self.parts if part.active]
        for part in held:
            part.active = False
        try:
            yield
        finally:
            for part in held:
                part.active = True

    def stay_eager(self, reason: str) -> None:
        """An error of the compiler, or the budget: one warning, and the run goes on eagerly."""
        for part in self.parts:
            part.undo()
        self.facts.decision, self.facts.reason = "eager", reason
        self.warn(f"compile: {reason}; the run goes on {'as it is' if self.owned else 'eagerly'}")

    def hold_budget(self, update: int) -> None:
        """At a window's close: note new graphs, and go back to eager where the budget is passed."""
        if not self.active:
            return
        graphs = self.watch.graphs
        self.compiled_at.extend([update] * (graphs - len(self.compiled_at)))
        if graphs - self.spared > self.config.recompile_budget:
            self.stay_eager(f"{graphs} graphs were built, over recompile_budget={self.config.recompile_budget}")
        elif fell := self.watch.fell_to_eager:
            self.stay_eager(
                f"torch stopped compiling {fell[0]} at its recompile limit, "
                f"recompile_budget={self.config.recompile_budget}"
            )

    def validation(self, model: nn.Module) -> None:
        """Compile the model that validation runs where training is compiled and `validate=compiled` asks; it falls
        back alone."""
        if self.config.validate_ != "compiled" or not self.active:
            return
        if any(part.module is model for part in self._validated):
            built = self.watch.phases().get("validation", 0)
            if built > self.config.recompile_budget and any(part.active for part in self._validated):
                for part in self._validated:
                    part.undo()
                self.warn(
                    f"compile: validation alone built {built} graphs, over recompile_budget="
                    f"{self.config.recompile_budget}; it goes on eagerly"
                )
            return
        part = compiling.InPlace(
            model,
            **self.arguments("whole"),
            give_up=lambda reason: self.warn(f"compile: validation runs eagerly: {reason}"),
        )
        part.install()
        self._validated.append(part)

    def sum_up(self) -> None:
        """Write what the watch saw into the report."""
        facts, watch = self.facts, self.watch
        facts.graphs, facts.recompiles = watch.graphs, watch.recompiles
        facts.recompile_reasons, facts.phases = watch.recompile_reasons, watch.phases()
        facts.graph_breaks, facts.graph_break_reasons = sum(watch.graph_breaks.values()), watch.graph_break_lines
        facts.seconds = round(watch.seconds, 3)
        facts.cache = watch.cache() if self.parts else ""
        facts.marking = self.parts[0].marker.way if self.parts else ""

    def end(self) -> None:
        for part in (*self.parts, *self._validated):
            part.undo()
        self.watch.end()

    def modules(self, scope: str = "") -> tuple[list[nn.Module], str]:
        """What to compile, and its name in the report: by the settings, or a plan's `scope`.

        `compile=auto` leaves `compile_scope=auto` to the model: its repeated blocks where they are most of it.

        Raises:
            CompileRefused
        """
        wanted: str | list[str] = self.config.compile_scope
        exclude = self.config.compile_exclude
        if isinstance(wanted, list):
            found = compiling.matching(self.model, wanted, exclude)
            if not found:
                raise compiling.CompileRefused(f"compile_scope={','.join(wanted)}: no module has such a name")
            return found, "features"
        blocks = self._blocks()
        if wanted == "auto" and self.config.compile != "on":
            wanted = "regional" if blocks and (exclude or compiling.covers(self.model, blocks)) else "whole"
        wanted = scope or wanted
        if wanted == "features":
            raise compiling.CompileRefused("a plan that compiles features needs compile_scope=NAME PATTERNS")
        if wanted == "regional":
            if not blocks:
                raise compiling.CompileRefused("compile_scope=regional: the model has no repeated blocks; use whole")
            return blocks, "regional"
        if exclude:
            raise compiling.CompileRefused(
                f"compile_exclude={','.join(exclude)}: the whole forward is one graph; "
                "use compile_scope=regional or name patterns"
            )
        return [self.model], "whole"

    def _blocks(self) -> list[nn.Module]:
        left_out = {id(m) for m in compiling.matching(self.model, self.config.compile_exclude, [])}
        return [block for block in compiling.regions(self.model) if id(block) not in left_out]
