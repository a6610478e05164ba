"""Training and validation loss of a run, as its host has them, and what they say of overfitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import mean, median

Point = tuple[float, float | None]  # (epoch or update, loss); None: it was not finite

LARGEST = 1e30  # what is larger is not drawn
KEPT = 200  # points of a curve that the report holds
ENOUGH = 3  # validations, for a word on their trend
RISE = 0.05  # of the lowest validation loss
SHARE = 0.02  # of what validation has gained, which a rise has to exceed too: near 0 any rise is large
GAIN = 0.01  # of the loss in the last third of the validations, below which it stands still


@dataclass
class LossFacts:
    """Points (position, loss); the position counts `unit`s, which are epochs or updates."""

    unit: str = "update"
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)

    def thinned(self) -> LossFacts:
        """At most `KEPT` points of each."""
        return LossFacts(self.unit, thinned(self.train, KEPT), thinned(self.valid, KEPT))


class Trend(Enum):
    """What the validation loss did."""

    UNKNOWN = "too few finite validations for a word on it"
    FALLING = "it was still falling at the end"
    LEVEL = "it stands still at its lowest"
    OVERFITTING = "it rises while the training loss falls"
    RISING = "it rises, and the training loss does not fall"


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Of long curves the means of neighbours, as many as leave `most` points; what is not finite is left out of a mean.

    A neighbourhood stands at its last position, so that a curve ends where the run did.
    """
    width = -(-len(points) // most) if points else 1
    if width == 1:
        return list(points)
    parts = [points[at : at + width] for at in range(0, len(points), width)]
    return [(part[-1][0], mean(y) if (y := [loss for _, loss in finite(part)]) else None) for part in parts]


def finite(points: Sequence[Point]) -> list[tuple[float, float]]:
    """The points that can be drawn and compared."""
    return [(x, y) for x, y in points if y is not None and abs(x) < LARGEST and abs(y) < LARGEST]


def lowest(points: Sequence[Point]) -> tuple[float, float] | None:
    """Where a loss was lowest, the first time; None where it was never finite."""
    return min(finite(points), key=lambda point: point[1], default=None)


def trend(facts: LossFacts) -> Trend:
    """What the validation loss did, judged from its lowest point on; one noisy validation decides nothing."""
    valid = finite(facts.valid)
    best = lowest(valid)
    if best is None or len(valid) < ENOUGH:
        return Trend.UNKNOWN
    after = [y for x, y in valid if x > best[0]]
    gained = valid[0][1] - best[1]
    if len(after) > 1 and median(after) - best[1] > max(RISE * abs(best[1]), SHARE * gained):
        return Trend.OVERFITTING if _train_falls(facts, best[0]) else Trend.RISING
    earlier = min(y for _, y in valid[: max(len(valid) * 2 // 3, 1)])
    gains = earlier - best[1] > GAIN * abs(earlier)
    return Trend.FALLING if gains and len(after) <= 1 else Trend.LEVEL


def _train_falls(facts: LossFacts, since: float) -> bool:
    """Whether the training loss is lower at the end than around `since`; so where the host told none."""
    train = finite(facts.train)
    before, after = [y for x, y in train if x <= since], [y for x, y in train if x > since]
    if not before or not after:
        return True
    width = max(len(after) // 3, 1)
    return mean(after[-width:]) < mean(before[-width:])


def sentence(facts: LossFacts) -> str:
    """On overfitting, in plain words; empty where the host told no loss."""
    best, valid = lowest(facts.valid), finite(facts.valid)
    if best is None:
        told = bool(facts.train) and not facts.valid
        return "No validation loss was told: nothing can be said of overfitting." if told else ""
    found = trend(facts)
    lost = f"{len(valid)} validation{'s' if len(valid) != 1 else ''}"
    at, low, last = f"{facts.unit} {best[0]:g}", f"{best[1]:.4g}", f"{valid[-1][1]:.4g}"
    calm = "No sign of overfitting: the validation loss"
    return {
        Trend.UNKNOWN: f"{lost}, the lowest loss {low}: too few for a word on overfitting.",
        Trend.FALLING: f"{calm} was still falling at the end, to {low} at {at}.",
        Trend.LEVEL: f"{calm} stands still, lowest {low} at {at}, {last} at the end.",
        Trend.OVERFITTING: f"It overfits: the validation loss was lowest at {at} ({low}) and is {last} at the end, "
        "while the training loss went on falling.",
        Trend.RISING: f"The validation loss was lowest at {at} ({low}) and is {last} at the end, and the training loss "
        "did not fall either: that is no overfitting, the training itself gets worse.",
    }[found]
