"""What was decided of a run's compile and of its plan, as values. The report is written from them, and never read back.

Stages of a compile:

    OFF         compile=off
    WAITING     compile=auto; the run's own steps are timed first
    COMPILING   a compile is under way, in a worker or in the run
    RUNNING     compiled code is in force
    EAGER       it is not: the outcome says why

    WAITING -> COMPILING -> RUNNING -> EAGER      (an error of the compiler, or the budget of graphs)
       |           '------> EAGER                 (it failed, took too long, or did not win)
       '--> RUNNING | EAGER                       (remembered, resumed, given by a file, or not worth a trial)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from plugins.core.telemetry.report import CompileFacts


class CompileStage(str, Enum):
    """Where the compile of a run stands."""

    OFF = "off"
    WAITING = "waiting"
    COMPILING = "compiling"
    RUNNING = "running"
    EAGER = "eager"


class CompileResult(str, Enum):
    """What a decision about the compile came to, or was made by."""

    UNDECIDED = "undecided"
    ASKED = "asked"  # the settings say so: compile=on, compile=off
    OWNED = "owned"  # the model's owner compiled it
    IMPOSSIBLE = "impossible"  # here, or with these settings
    NOT_WORTH = "not worth"  # a trial: it could not be won back
    NO_MEMORY = "no memory"  # for its first step, by a forecast
    NO_TRIAL = "no trial"  # was possible
    TRIAL_FAILED = "trial failed"  # of the eager step, or of the step itself: told already
    FAILED = "failed"  # the compiler did
    OUT_OF_TIME = "out of time"
    OVER_BUDGET = "over budget"  # of graphs
    WRONG = "wrong"  # numbers
    LOST = "lost"
    WON = "won"
    REMEMBERED = "remembered"  # from an earlier run
    RESUMED = "resumed"
    CUT_SHORT = "cut short"  # the run ended first


@dataclass(frozen=True)
class CompileOutcome:
    """One decision about the compile.

    Attributes:
        outcome: what it came to.
        reason: the same for a person, in one line; nothing is decided by it.
        retryable: whether another run of the same work may come to something else.
    """

    outcome: CompileResult
    reason: str
    retryable: bool = True


UNDECIDED = CompileOutcome(CompileResult.UNDECIDED, "compile=auto starts eager")


class CompileDecision:
    """The one owner of a run's compile decision, and the one writer of it into the report.

    Attributes:
        stage: where the compile stands.
        outcome: the latest decision.
        scope: of the compiled code in force: whole, regional or features.
    """

    def __init__(self, facts: CompileFacts) -> None:
        self.stage, self.outcome, self.scope = CompileStage.WAITING, UNDECIDED, ""
        self._facts = facts

    @property
    def running(self) -> bool:
        """Whether compiled code is in force."""
        return self.stage is CompileStage.RUNNING

    @property
    def undecided(self) -> bool:
        """Whether nothing was decided so far."""
        return self.outcome.outcome is CompileResult.UNDECIDED

    def now(self, stage: CompileStage, outcome: CompileOutcome | None = None, scope: str = "") -> None:
        """The compile stands at `stage` from now on; without an `outcome` for the same reason as before."""
        self.stage, self.scope = stage, scope
        self.outcome = outcome or self.outcome
        self.write()

    def write(self, undecided: str = "") -> None:
        """Write the decision into the report; `undecided` is why there is none, as far as is known by now."""
        self._facts.decision = self.scope if self.running else "eager"
        self._facts.reason = undecided if undecided and self.undecided else self.outcome.reason


class TuningStage(str, Enum):
    """What a run's tuning does: it times the run's own steps, compiles beside them, or is over."""

    TIMING = "timing"
    COMPILING = "compiling"
    DONE = "done"


class TuningResult(str, Enum):
    """What the choice of a precision and a layout came to."""

    UNDECIDED = "undecided"
    NO_TRIAL = "no trial"
    TOO_SHORT = "too short"
    KEPT = "kept"  # the plan that the run began with
    WON = "won"
    REMEMBERED = "remembered"
    RESUMED = "resumed"


@dataclass(frozen=True)
class TuningOutcome:
    """Why precision and layout are what they are; `reason` is for a person, and empty while UNDECIDED."""

    outcome: TuningResult = TuningResult.UNDECIDED
    reason: str = ""
