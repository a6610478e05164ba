"""What a run's report holds, as far as an adapter or a plug reads it or fills it in. See `integrations.contract`."""

from __future__ import annotations

from typing import Any, Protocol


class WindowFacts(Protocol):
    """Counts of the run so far; the report's `window`."""

    @property
    def accumulate(self) -> int:
        """Micro-batches an update."""

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""

    @property
    def effective_batch(self) -> int:
        """Samples an update: `accumulate * micro_batch`."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches that were counted."""

    @property
    def updates(self) -> int:
        """Updates that happened."""

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped, for a gradient that is not finite."""


class CompileFacts(Protocol):
    """The report's `compile`."""

    @property
    def decision(self) -> str:
        """The scope of the compiled code in force, or `eager`."""


class ShapeFacts(Protocol):
    """The report's `shapes`; an adapter fills in the buckets (px or tokens)."""

    buckets: list[int]


class LossFacts(Protocol):
    """The report's `losses`; an adapter fills in the host's own, as (position, mean loss) over `epoch` or `update`."""

    unit: str
    train: list[tuple[float, float | None]]
    valid: list[tuple[float, float | None]]


class EmaFacts(Protocol):
    """The report's `ema`; an adapter fills in the decay."""

    decay: float | str | None


class Report(Protocol):
    """The parts of the report that an adapter or a plug reads or fills in."""

    versions: dict[str, str]
    config: dict[str, Any]
    checkpoints: list[str]

    @property
    def window(self) -> WindowFacts:
        """Counts of micro-batches and updates."""

    @property
    def compile(self) -> CompileFacts:
        """What was decided of the compile."""

    @property
    def shapes(self) -> ShapeFacts:
        """Shapes of the input, and the buckets."""

    @property
    def ema(self) -> EmaFacts:
        """The moving average of the weights."""

    @property
    def losses(self) -> LossFacts:
        """Training and validation loss, as the host has them."""

    def data(self) -> dict[str, Any]:
        """As in `accel_report.json`."""
