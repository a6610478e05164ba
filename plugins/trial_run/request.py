"""What a trial run is asked for, handed over to the child process as a JSON file. Imports nothing heavy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "ACCEL_TRIAL"  # names the request's file
REQUEST_NAME = "trial.json"
CONTRADICTING = ("accumulate", "effective_batch")  # one replaces the other


@dataclass(frozen=True)
class TrialRequest:
    """One trial of a user's own training.

    Attributes:
        updates: after so many the job is ended; at least 1.
        folder: where the host's run folder, the logs and the request itself lie.
        micro_batch: samples a micro-batch, instead of the job's own; None leaves it.
        settings: fields of AccelConfig, by their public names, that win over all sources.
        record: JSON lines that the child appends; `trial.jsonl` in the folder where None is given.
        checks: what is looked at beside (names as in `plugins.trial_run.child`).
        memory_gib: of an accelerator, the most that the child may take; None sets no limit.
    """

    updates: int
    folder: Path
    micro_batch: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    record: Path | None = None
    checks: tuple[str, ...] = ()
    memory_gib: float | None = None

    @property
    def lines(self) -> Path:
        """Of the record."""
        return self.record or self.folder / "trial.jsonl"

    @property
    def run_folder(self) -> Path:
        """Of the host's own files."""
        return self.folder / "run"

    def write(self) -> Path:
        """Write the request into its folder; returns the file that `ACCEL_TRIAL` is to name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder.absolute() / REQUEST_NAME
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> TrialRequest:
        """What `write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data |= {"folder": Path(data["folder"]), "checks": tuple(data["checks"])}
        data["record"] = Path(data["record"]) if data["record"] else None
        return cls(**data)


def current() -> TrialRequest | None:
    """The request that this process was started with; None outside a trial."""
    path = os.environ.get(VARIABLE)
    return TrialRequest.read(Path(path)) if path else None


def note(**facts: Any) -> None:
    """Append a line to the record of this process's trial; the first of several ranks does."""
    request = current()
    if request is not None and int(os.environ.get("RANK") or 0) <= 0:
        with request.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def laid_over(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of AccelConfig, with the settings of this process's trial in their place."""
    request = current()
    if request is None or not request.settings:
        return dict(options)
    given = request.settings
    replaced = CONTRADICTING if any(name in given for name in CONTRADICTING) else ()
    return {**{name: value for name, value in options.items() if name not in replaced}, **given}
