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
from plugins.core.compile import compiled_module as compiling
from plugins.core.compile import cuda_graphs as cudagraphs
from plugins.core.compile.decision import CompileDecision, CompileOutcome, CompileResult, CompileStage
from plugins.core.compile.dynamic_shapes import Marker
from plugins.core.compile.monitor import CompileMonitor, show_progress
from plugins.core.compile.scope import modules_of
from plugins.core.compile.toolchain import missing_compiler
from plugins.core.plan import Plan
from plugins.core.step.checkpointed_module import compiled_call
from plugins.core.system import memory
from plugins.core.telemetry.report import CompileFacts

Takes = Callable[[tuple[Any, ...]], bool]
OWNED = CompileOutcome(CompileResult.OWNED, "the model is compiled already, by its owner")


@dataclass
class Code:
    """Compiled calls that may stand on a model. Without parts it is eager."""

    parts: list[compiling.CompiledModule] = field(default_factory=list)
    scope: str = "eager"
    mode: str = "default"


class CompileManager:
    """Installs compiled calls on a model by the settings, and holds them to `recompile_budget`.

    Attributes:
        decision: what was decided of the compile.
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
        self.decision = CompileDecision(facts)
        self.code = Code(mode=config.compile_mode)
        self.spared = 0
        self.compiled_at: list[int] = []
        self._validated: list[compiling.CompiledModule] = []
        self.monitor = CompileMonitor(show_progress)
        self.monitor.start()

    @property
    def impossible(self) -> CompileOutcome | None:
        """Why nothing can be compiled here, where that is so."""
        if self.owned and not self._impossible:
            return OWNED
        why = self._impossible or self._no_compiler
        return CompileOutcome(CompileResult.IMPOSSIBLE, why) if why else None

    @property
    def owned(self) -> bool:
        """Whether the model's owner compiled it, or a part of it: that stays as it is."""
        return any(
            isinstance(m, torch._dynamo.OptimizedModule)
            or not isinstance(compiled_call(m), (compiling.CompiledModule, NoneType))
            for m in self.model.modules()
        )

    @cached_property
    def _no_compiler(self) -> str:
        """Looking for a compiler takes a second: only when it is needed."""
        return missing_compiler(self.device, self.config.compile_backend)

    @property
    def parts(self) -> list[compiling.CompiledModule]:
        """The compiled calls that stand on the model."""
        return self.code.parts

    @property
    def active(self) -> bool:
        """Whether any of them is in use."""
        return any(part.active for part in self.parts)

    @property
    def cuda_graphs(self) -> bool:
        """Whether code with CUDA graphs is in force: gradients are then zeroed in place, and never dropped."""
        wanted = self.active and self.code.mode in compiling.CUDA_GRAPH_MODES
        return wanted and cudagraphs.has_cuda_graphs(self.device, self.config.compile_backend)

    @property
    def may_use_cuda_graphs(self) -> bool:
        """Whether a plan may have them here, room for them apart."""
        return cudagraphs.may_use_cuda_graphs(self.device, self.config, self.dims)

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
            self.decision.now(CompileStage.OFF, CompileOutcome(CompileResult.ASKED, "compile=off"))
            return
        compiling.check_backend(self.config.compile_backend)
        modules, scope = self.modules()
        if self.config.compile == "auto":
            if self.owned:
                self.decision.now(CompileStage.EAGER, OWNED)
            self.decision.write()
        elif impossible := self.impossible:
            self.stay_eager(impossible)
        else:
            self.put(self.build(modules, scope))
            self.runs(CompileOutcome(CompileResult.ASKED, "compile=on"))

    def build(
        self,
        modules: list[nn.Module],
        scope: str,
        cuda_graphs: bool = False,
        give_up: compiling.GiveUp | None = None,
    ) -> Code:
        """Compiled calls of these modules, to be `put`; `give_up` is told of an error instead of the run."""
        way = "static" if self.config.dynamic == "static" else "strict"
        parts = [
            compiling.CompiledModule(
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
        """This code stands on the model from now on, and no other. A trial decides nothing: see `runs`."""
        for part in self.parts:
            part.undo()
        for part in code.parts:
            part.install()
        self.code = code
        self.preallocate()

    def runs(self, outcome: CompileOutcome | None = None) -> None:
        """The code that stands on the model is the run's own from now on."""
        self.decision.now(CompileStage.RUNNING, outcome, self.code.scope)

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
            self.decision.now(CompileStage.EAGER)
            return plan
        try:
            impossible = self.impossible
            if impossible is None:
                self.put(self.build(*self.modules(plan.compile), plan.cuda_graphs))
        except compiling.CompileRefused as error:
            impossible = CompileOutcome(CompileResult.IMPOSSIBLE, str(error))
        if impossible is not None:
            self.stay_eager(impossible)
            return plan.eager
        self.runs()
        return plan

    def undo(self) -> None:
        """Off the model."""
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

    def stay_eager(self, outcome: CompileOutcome) -> None:
        """An error of the compiler, or the budget: one warning, and the run goes on eagerly."""
        for part in self.parts:
            part.undo()
        self.decision.now(CompileStage.EAGER, outcome)
        self.warn(f"compile: {outcome.reason}; the run goes on {'as it is' if self.owned else 'eagerly'}")

    def hold_budget(self, update: int) -> None:
        """At a window's close: note new graphs, and go back to eager where the budget is passed."""
        if not self.active:
            return
        graphs, budget = self.monitor.graphs, self.config.recompile_budget
        self.compiled_at.extend([update] * (graphs - len(self.compiled_at)))
        if graphs - self.spared > budget:
            reason = f"{graphs} graphs were built, over recompile_budget={budget}"
        elif fell := self.monitor.fell_to_eager:
            reason = f"torch stopped compiling {fell[0]} at its recompile limit, recompile_budget={budget}"
        else:
            return
        self.stay_eager(CompileOutcome(CompileResult.OVER_BUDGET, reason, retryable=False))

    def validation(self, model: nn.Module) -> None:
        """Compile the model that validation runs, where training is compiled and `validate=compiled` asks.

        It falls back to eager alone.
        """
        if self.config.validate_ != "compiled" or not self.active:
            return
        if any(part.module is model for part in self._validated):
            built = self.monitor.phases().get("validation", 0)
            if built > self.config.recompile_budget and any(part.active for part in self._validated):
                for part in self._validated:
                    part.undo()
                self.warn(
                    f"compile: validation alone built {built} graphs, over recompile_budget="
                    f"{self.config.recompile_budget}; it goes on eagerly"
                )
            return
        part = compiling.CompiledModule(
            model,
            **self.arguments("whole"),
            give_up=lambda fault: self.warn(f"compile: validation runs eagerly: {fault.reason}"),
        )
        part.install()
        self._validated.append(part)

    def sum_up(self) -> None:
        """Write what the watch saw into the report."""
        facts, monitor = self.facts, self.monitor
        facts.budget, facts.mode = self.config.recompile_budget, self.code.mode
        facts.graphs, facts.recompiles = monitor.graphs, monitor.recompiles
        facts.recompile_reasons, facts.phases = monitor.recompile_reasons, monitor.phases()
        facts.graph_breaks, facts.graph_break_reasons = sum(monitor.graph_breaks.values()), monitor.graph_break_lines
        facts.seconds = round(monitor.seconds, 3)
        facts.cache = monitor.cache() if self.parts else ""
        facts.marking = self.parts[0].marker.way if self.parts else ""

    def end(self) -> None:
        """Take everything off the model, and stop watching."""
        for part in (*self.parts, *self._validated):
            part.undo()
        self.monitor.end()

    def modules(self, scope: str = "") -> tuple[list[nn.Module], str]:
        """What to compile, and its name in the report: by the settings, or a plan's `scope`.

        Raises:
            CompileRefused
        """
        return modules_of(self.model, self.config, scope)
