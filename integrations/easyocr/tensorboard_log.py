"""What a run shows while it runs: a progress bar, a csv, TensorBoard scalars and sample predictions."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from integrations.easyocr.writer import Writer

SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Row:
    """One validation. Losses are CTC means; accuracy and norm_ED are 0..1; samples_per_second is training's."""

    update: int
    epoch: int
    train_loss: float
    valid_loss: float
    accuracy: float
    norm_ED: float
    lr: float
    samples_per_second: float
    infeasible: int


class Board:
    """One run's display. `rows` is the history, also of the run that this one resumes.

    TensorBoard's log is given up where it cannot be written, with a warning.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        *,
        rows: list[Row],
        writer: Writer,
        warn: Callable[[str], None],
        tensorboard: bool,
        progress: bool,
    ) -> None:
        self.folder, self.rows, self.writer, self.warn = folder, rows, writer, warn
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  accuracy {task.fields[accuracy]}"),
            TextColumn("{task.fields[speed]:.1f} samples/s"),
            TimeRemainingColumn(),
            disable=not progress,
        )
        self.task = self.bar.add_task("training", total=total, loss=float("nan"), accuracy="-", speed=0.0)
        self.events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = rows[-1].update + 1 if rows else None
            with self._giving_up():
                self.events = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self.bar.start()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.events = None
            self.warn(f"{self.folder / 'tensorboard'}: {error.strerror or error}; TensorBoard's log is given up")

    def training(self, update: int, loss: float, lr: float, speed: float) -> None:
        """Show the state of training. `speed`: samples/s."""
        accuracy = f"{self.rows[-1].accuracy:.1%}" if self.rows else "-"
        self.bar.update(self.task, completed=update, loss=loss, accuracy=accuracy, speed=speed)
        with self._giving_up():
            if self.events is not None:
                self.events.add_scalar("train/loss", loss, update)
                self.events.add_scalar("train/lr", lr, update)
                self.events.add_scalar("train/samples_per_second", speed, update)

    def validated(self, row: Row, samples: list[tuple[np.ndarray, str, str]]) -> None:
        """Adds a row to `log.csv`; `samples` are (grey picture, read, label)."""
        self.rows.append(row)
        table = io.StringIO()
        writer = csv.DictWriter(table, list(asdict(row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(known) for known in self.rows)
        self.writer(self.folder / "log.csv", lambda file: file.write(table.getvalue().encode()))
        with self._giving_up():
            if self.events is not None:
                self.events.add_scalar("valid/loss", row.valid_loss, row.update)
                self.events.add_scalar("valid/accuracy", row.accuracy, row.update)
                self.events.add_scalar("valid/norm_ED", row.norm_ED, row.update)
                read = "  \n".join(f"`{read}` ({label})" for _, read, label in samples)
                self.events.add_text("valid/read", read, row.update)
                for number, (grey, _, _) in enumerate(samples[:SAMPLES_SHOWN]):
                    self.events.add_image(f"valid/{number}", grey[None], row.update)

    def close(self) -> None:
        """Stop the progress bar and close the events file."""
        self.bar.stop()
        with self._giving_up():
            if self.events is not None:
                self.events.close()


class Pace:
    """Mean training loss and samples/s since the last `reset`; losses stay on their device until they are asked for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new span."""
        self.loss: Any = 0.0
        self.samples = 0
        self.untimed = 0  # samples of before a resume
        self.began = time.perf_counter()

    def add(self, loss: Any, samples: int) -> None:
        """`loss`: the mean over `samples`, a 0-dim tensor without its graph."""
        self.loss = self.loss + loss * samples
        self.samples += samples

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"loss": float(self.loss), "samples": self.samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """The mean goes on; the clock begins anew."""
        self.reset()
        self.loss, self.samples = state["loss"], state["samples"]
        self.untimed = self.samples

    @property
    def mean_loss(self) -> float:
        """Of the span; NaN while it is empty."""
        return float(self.loss) / self.samples if self.samples else float("nan")

    @property
    def speed(self) -> float:
        """Samples/s of this process in the span."""
        return (self.samples - self.untimed) / max(time.perf_counter() - self.began, 1e-9)
