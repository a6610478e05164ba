"""Where a run stands beyond weights and optimizer: data read, scores, best weights and what was exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from integrations.easyocr import mistakes_picture
from integrations.easyocr.prepare import Prepared
from integrations.easyocr.reader import Exported, place_detector
from integrations.easyocr.reading import Readings
from integrations.easyocr.scoring import Score
from integrations.easyocr.tensorboard_log import Row
from integrations.easyocr.weights import PREFIX
from integrations.easyocr.writer import Writer

LOST_SHOWN = 20
STEPS = ("optim", "lr", "beta1", "rho", "eps")  # which a resumed run takes from its file


@dataclass
class Result:
    """What a run came to.

    Attributes:
        folder: of the experiment.
        exported: the Reader's three files, with the best weights.
        updates: that were made, skipped ones included.
        accuracy: share of words read right, 0 to 1, of the best weights.
        norm_ED: mean similarity of what was read and what is written, 0 to 1, of the best weights.
        stopped: num_iter, patience, diverged (100 updates in a row were skipped) or interrupted.
        history: one row per validation, as in log.csv.
        lang_list: languages that the Reader may be opened with.
        report: accel_report.json, or None where it could not be written.
        infeasible: times that a label needed more frames than its crop gives.
        unreadable: pictures that could not be decoded and were left out.
        notes: what a user of the network should know.
    """

    folder: Path
    exported: Exported
    updates: int
    accuracy: float
    norm_ED: float
    stopped: str
    history: list[Row]
    lang_list: list[str]
    report: Path | None = None
    infeasible: int = 0
    unreadable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def reader(self, **options: Any) -> Any:
        """`easyocr.Reader` on the exported network; on the CPU in full precision unless `options` say otherwise."""
        return self.exported.reader(self.lang_list, **options)


def earlier_run(prepared: Prepared) -> Path | None:
    """What an earlier run left in the experiment folder that a new one would write over."""
    kept = (prepared.folder / "last.pt", prepared.folder / "best_accuracy.pth", prepared.exported.files[0])
    return next((path for path in kept if path.is_file()), None)


def in_the_way(prepared: Prepared) -> Path | None:
    """A folder in the place of a file that this run is to write."""
    own = ("last.pt", "best_accuracy.pth", "best_norm_ED.pth", "log.csv", "curves.png", "mistakes.png")
    paths = (*(prepared.folder / name for name in own), *prepared.exported.files)
    return next((path for path in paths if path.is_dir()), None)


@dataclass
class Standing:
    """position: micro-batches this process has read; stale: validations since the best one."""

    prepared: Prepared
    writer: Writer
    position: int = 0
    infeasible: int = 0
    stale: int = 0
    unreadable: list[str] = field(default_factory=list)
    history: list[Row] = field(default_factory=list)
    best: dict[str, Score] = field(default_factory=dict)
    exported: Exported | None = None
    readings: Readings | None = None  # of the exported weights, where this process made them
    steps: dict[str, Any] = field(default_factory=dict)  # settings of the optimizer, in force

    def __post_init__(self) -> None:
        self.steps = self._wanted_steps()

    @property
    def top(self) -> Score:
        """The score of the weights that the Reader's files hold; zero before the first validation."""
        return self.best.get("accuracy", Score(0.0, 0.0, 0))

    def lost(self, names: list[str]) -> list[str]:
        """Remembers pictures that cannot be decoded; returns a sentence for each new one, the first twenty apart."""
        new = [name for name in dict.fromkeys(names) if name not in self.unreadable]
        before = len(self.unreadable)
        self.unreadable += new
        told = [f"left out, the picture cannot be decoded: {name}" for name in new[: max(0, LOST_SHOWN - before)]]
        if before <= LOST_SHOWN < len(self.unreadable):
            told.append("more pictures cannot be decoded; the result's `unreadable` lists them all")
        return told

    def keep(self, found: Score, weights: Callable[[], dict[str, Any]], readings: Readings) -> None:
        """Writes the weights that are best by accuracy, and by edit distance; the Reader gets the former.

        `readings`: what these weights read, whose score is `found`.
        """
        known, top = self.best.get("norm_ED"), self.best.get("accuracy")
        self.stale += 1
        if found.better_than(top):
            self.stale = 0
            self.best["accuracy"] = found
            self.readings = readings
            self._write("best_accuracy.pth", weights())
            self.export(weights())
        if known is None or found.similarity > known.similarity:
            self.best["norm_ED"] = found
            self._write("best_norm_ED.pth", weights())

    def export(self, weights: Mapping[str, Any]) -> None:
        """Write the Reader's three files with these weights, and the detector beside them."""
        self.exported = self.prepared.export(dict(weights), self.writer)
        storage = [Path(self.prepared.settings.saved_model).parent] if self.prepared.settings.saved_model else []
        place_detector(self.exported, storage, self.writer)

    def _write(self, name: str, weights: Mapping[str, Any]) -> None:
        """Under the official names and keys, as the official trainer saves."""
        state = {PREFIX + key: value.cpu().contiguous() for key, value in weights.items()}
        self.writer(self.prepared.folder / name, lambda file: torch.save(state, file))

    def draw(self, device: torch.device | None) -> None:
        """Curves of the whole run, and the mistakes of the exported weights.

        Where an earlier process chose those and drew nothing, they are read again on `device`, if there is one.
        """
        folder = self.prepared.folder
        if device and self.readings is None and self.best and not (folder / "mistakes.png").is_file():
            self.readings = self.prepared.read_exported(device)
        if self.history:
            mistakes_picture.curves(self.history, folder / "curves.png", self.writer)
        if self.readings is not None:
            mistakes_picture.mistakes(self.readings, self.prepared.valid, folder / "mistakes.png", self.writer)

    def result(self, updates: int, stopped: str, report: Path | None) -> Result:
        """What `fit` returns."""
        settings, top = self.prepared.settings, self.top
        return Result(
            self.prepared.folder,
            self.prepared.exported,
            updates,
            top.accuracy,
            top.similarity,
            stopped,
            self.history,
            settings.lang_list,
            report,
            self.infeasible,
            self.unreadable,
            self.prepared.notes,
        )

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint that loads with `weights_only=True`."""
        return {
            "position": self.position,
            "infeasible": self.infeasible,
            "stale": self.stale,
            "unreadable": list(self.unreadable),
            "characters": self.prepared.characters,
            "steps": self.steps,
            "best": {name: asdict(found) for name, found in self.best.items()},
            "history": [asdict(row) for row in self.history],
        }

    def _wanted_steps(self) -> dict[str, Any]:
        return {name: getattr(self.prepared.settings, name) for name in STEPS}

    def other_steps(self, state: Mapping[str, Any]) -> str:
        """Those of `state` that are not this run's, as `lr=0.1, ...`."""
        own = self._wanted_steps()
        return ", ".join(f"{k}={v}" for k, v in state.get("steps", own).items() if k in own and v != own[k])

    def load(self, state: Mapping[str, Any], own: bool) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state_dict` gave.
            own: it is this folder's. The Reader's files are then those of its best weights; where they are not there,
                or another run's, the next validation decides anew what is best.
        """
        for name in ("position", "infeasible", "stale", "unreadable"):
            setattr(self, name, state[name])
        self.steps = dict(state.get("steps", self.steps))
        self.best = {name: Score(**found) for name, found in state["best"].items()}
        self.history[:] = [Row(**row) for row in state["history"]]
        there = all(file.is_file() for file in self.prepared.exported.files)
        self.exported = self.prepared.exported if own and there else None
        if self.exported is None:
            self.best = {}
