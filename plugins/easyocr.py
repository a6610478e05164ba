"""fit: fine-tunes an EasyOCR recognizer from the official yaml, and leaves files that `easyocr.Reader` loads.

    from plugins.easyocr import fit
    result = fit("config.yaml", accumulate=2)
    result.reader().readtext("page.png")

In the experiment folder: `last.pt` (everything a resume needs), `best_accuracy.pth`, `best_norm_ED.pth`, the Reader's
three files (`model/NAME.pth`, `user_network/NAME.yaml`, `user_network/NAME.py`), `log.csv`, `curves.png`,
`mistakes.png`, `tensorboard/` and `accel_report.*`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from integrations.easyocr import optim, pictures
from integrations.easyocr.batches import WidthBatches
from integrations.easyocr.board import Board, Pace, Row
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.export import Exported
from integrations.easyocr.labels import ctc_loss
from integrations.easyocr.network import read
from integrations.easyocr.prepare import Prepared, prepare
from integrations.easyocr.reading import Readings, read_lines
from integrations.easyocr.scoring import Score, score
from integrations.easyocr.settings import Settings, read_settings
from integrations.easyocr.stream import MicroBatch, loader
from plugins.config import AccelConfig
from plugins.core.checkpoint import seed_everything, sweep, write_atomically
from plugins.core.report import versions
from plugins.core.shapes import choose_edges
from plugins.core.update import NonFiniteGradient
from plugins.errors import AccelError
from plugins.loop import Accelerated

WIDTH_STEP = 16  # px; bucket edges are its multiples
MOST_BUCKETS = 6  # leaves room in the compile budget for the partial batch of an epoch
SHOW_EVERY = 10  # updates


@dataclass
class Result:
    """What a run came to. accuracy, norm_ED: 0..1, of the best weights, which `exported` holds."""

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


def fit(
    config: str | Path | dict[str, Any],
    *,
    train: Any = None,
    valid: Any = None,
    resume: bool | str | Path = False,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Result:
    """Trains until `num_iter` updates, an early stop, or Ctrl-C (which finishes the update and saves everything).

    Args:
        config: the official yaml, or its keys as a mapping; `accel:` in it holds AccelConfig's fields.
        train, valid: folders or Hugging Face data sets, instead of the yaml's train_data and valid_data.
        resume: True goes on from the experiment's own last.pt, a path from that file.
        options: keys of the yaml and fields of AccelConfig, laid over both.

    Raises:
        AccelError: one line that names the file or key, the value and what is allowed; nothing is written then.
    """
    fields = {f.alias or name for name, f in AccelConfig.model_fields.items()} | {"config"}
    try:
        settings, accel = read_settings(config, **{k: v for k, v in options.items() if k not in fields})
        chosen = _config({**accel, **{k: v for k, v in options.items() if k in fields}})
        seed_everything(settings.manualSeed if chosen.seed == "host" else int(chosen.seed))
        prepared = prepare(settings, train, valid)
    except EasyOCRError as error:
        raise AccelError(str(error)) from None
    last = prepared.folder / "last.pt"
    start = last if resume is True else Path(resume) if resume else None
    if start is None and last.is_file():
        raise AccelError(
            f"experiment_name={settings.experiment_name}: {last} is there already; resume=True goes on from it, "
            "another experiment_name or output leaves it alone"
        )
    return _Run(prepared, chosen, say).train(start)


def _config(options: dict[str, Any]) -> AccelConfig:
    """The settings, with this plug's own defaults: bf16 where the machine has it, and only the features compiled."""
    chosen = AccelConfig(options.pop("config", None), **options)
    given, own = chosen.given(), {}
    if "precision" not in given:
        own["precision"] = "auto"
    if chosen.compile_scope == "auto":
        own["compile_scope"] = ["FeatureExtraction"]  # type: ignore[assignment]
    return chosen.model_copy(update=own)


class _Run:
    """The loop over one `Prepared`; `train` is the whole of it."""

    def __init__(self, prepared: Prepared, config: AccelConfig, say: Callable[[str], None]) -> None:
        self.prepared, self.settings, self.folder = prepared, prepared.settings, prepared.folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.first = self.rank == 0
        self.say = say if self.first else lambda line: None
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.model = prepared.model.to(device)
        self.accel = Accelerated(
            self.model,
            optim.optimizer(self.model.parameters(), self.settings),
            micro_batch=self.settings.batch_size,
            schedule=optim.schedule(self.settings),
            clip_norm=self.settings.grad_clip,
            dims=(3,),
            host="easyocr",
            say=self.say,
            config=config,
        )
        self.batches = self._batches(config)
        self.history: list[Row] = []
        self.best: dict[str, Score] = {}
        self.exported: Exported | None = None
        self.readings: Readings | None = None
        self.position = self.infeasible = self.stale = 0
        self.unreadable: list[str] = []
        self.pace = Pace()

    def _batches(self, config: AccelConfig) -> WidthBatches:
        widths = self.prepared.lines.widths()
        if config.buckets == "auto":
            edges = choose_edges(widths, min(MOST_BUCKETS, config.recompile_budget), WIDTH_STEP)
        elif config.buckets == "off":
            edges = [max(*widths, self.settings.imgW)]
        else:
            edges = [edge for edge in config.buckets if edge < max(widths)] if max(widths) <= max(config.buckets) else [
                *config.buckets, max(widths)]  # fmt: skip
            edges = sorted({*edges, min((e for e in config.buckets if e >= max(widths)), default=max(widths))})
        self.accel.session.report.shapes.buckets = edges
        return WidthBatches(
            widths,
            edges,
            self.settings.batch_size,
            sizes=[len(part.lines) for part in self.prepared.sets],
            shares=self.settings.batch_ratio,
            usage=self.settings.total_data_usage_ratio,
            seed=self.settings.manualSeed,
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    def train(self, start: Path | None) -> Result:
        settings, accel = self.settings, self.accel
        stopped = "num_iter"
        try:
            if start is not None:
                self._resume(start)
            self.folder.mkdir(parents=True, exist_ok=True)
            sweep(self.folder)
            for note in self.prepared.notes:
                accel.session.warn(note)
            board = self._board()
        except BaseException:
            accel.end()
            raise
        report = None
        try:
            accel.train()
            with _asked_to_stop() as asked:
                for batch in self._stream():
                    if accel.updates >= settings.num_iter:
                        break
                    if self._micro_batch(batch) is None:
                        continue
                    if self.first and accel.updates % SHOW_EVERY == 0:
                        board.training(accel.updates, self.pace.mean_loss, self._rate(), self.pace.speed)
                    if accel.updates % settings.valInterval == 0:
                        self._validate(board)
                        if settings.patience and self.stale >= settings.patience:
                            stopped = "patience"
                            break
                    if self._agreed(asked.is_set()):
                        stopped = "interrupted"
                        break
            if stopped != "interrupted" and (not self.history or self.history[-1].update != accel.updates):
                self._validate(board)
            elif self.first:
                self._save()
            self._finish()
        except NonFiniteGradient as error:
            raise AccelError(f"nonfinite=stop: {error}; the last save is untouched") from None
        finally:
            board.close()
            report = accel.end(self.folder if self.first else None)
        assert self.exported is not None
        top = self.best.get("accuracy", Score(0.0, 0.0, 0))
        return Result(
            self.folder, self.exported, accel.updates, top.accuracy, top.similarity, stopped, self.history,
            settings.lang_list, report, self.infeasible, self.unreadable, self.prepared.notes,
        )  # fmt: skip

    def _stream(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches from where the run stands: every `world`-th of the common order, without end."""
        world = self.accel.world
        mine = islice(self.batches.from_position(self.position * world), self.rank, None, world)
        return iter(loader(self.prepared.lines, mine, self.settings.workers, pin=self.accel.device.type == "cuda"))

    def _micro_batch(self, batch: MicroBatch) -> Any:
        """Forward and backward; the update's outcome where this one closed a window, else None."""
        accel = self.accel
        self.position += 1
        self.infeasible += batch.infeasible
        for name in batch.unreadable:
            if name not in self.unreadable:
                self.unreadable.append(name)
                accel.session.warn(f"left out, the picture cannot be decoded: {name}")
        if not len(batch) and accel.world == 1:
            return None
        with accel.forward(batch.images) as images:
            logits = read(self.model, images)
        loss = ctc_loss(logits, batch.classes.to(accel.device), batch.lengths)
        self.pace.add(loss.detach(), len(batch))
        seen, (count, _, height, width) = accel.session.seen, batch.images.shape
        seen.padding, seen.elements = seen.padding + batch.padding * height, seen.elements + count * height * width
        return accel.backward(loss, weight=len(batch))

    # -- validation and files ------------------------------------------------------------------------------------

    def _validate(self, board: Board) -> None:
        """Reads the validation lines as the Reader does; rank 0 scores, saves and tells the others."""
        if self.first:
            with self.accel.validation() as model:
                self.readings = read_lines(
                    model,
                    self.prepared.valid,
                    self.prepared.preprocess,
                    self.prepared.codec,
                    self.accel.device,
                    batch_size=self.settings.batch_size,
                    decode=self.settings.decode,
                )
            found = score(self.readings.texts, self.readings.labels)
            epoch = self.batches.locate(self.position * self.accel.world)[0]
            row = Row(
                self.accel.updates, epoch, self.pace.mean_loss, self.readings.loss, found.accuracy, found.similarity,
                self._rate(), self.pace.speed, self.infeasible,
            )  # fmt: skip
            samples = [
                (grey, self.readings.texts[i], self.readings.labels[i])
                for i in range(min(8, len(self.readings.texts)))
                if (grey := self.prepared.valid.grey(self.readings.indices[i])) is not None
            ]
            board.validated(row, samples)
            self._keep(found)
            self._save()
        self.pace.reset()
        self.stale = self._from_first(self.stale)

    def _keep(self, found: Score) -> None:
        """Best weights by accuracy, and by normalised edit distance; the Reader's files hold the former."""
        weights: dict[str, Any] = {}
        top = self.best.get("accuracy")
        self.stale += 1
        if found.better_than(top):
            self.stale, weights = 0, self.accel.weights()
            self.best["accuracy"] = found
            self._write_weights("best_accuracy.pth", weights)
            self.exported = self.prepared.export(weights, write_atomically)
        known = self.best.get("norm_ED")
        if known is None or found.similarity > known.similarity:
            self.best["norm_ED"] = found
            self._write_weights("best_norm_ED.pth", weights or self.accel.weights())

    def _write_weights(self, name: str, weights: dict[str, Any]) -> None:
        """Under the official names: `module.` before each key, as the official trainer saves."""
        state = {f"module.{key}": value.cpu().contiguous() for key, value in weights.items()}
        write_atomically(self.folder / name, lambda file: torch.save(state, file))

    def _save(self) -> None:
        if self.exported is None:  # stopped before the first validation: what there is, is what the Reader gets
            self.exported = self.prepared.export(self.accel.weights(), write_atomically)
        self.accel.save(
            self.folder / "last.pt",
            position=self.position,
            infeasible=self.infeasible,
            stale=self.stale,
            unreadable=self.unreadable,
            characters=self.prepared.characters,
            order=self._order(),
            best={name: asdict(found) for name, found in self.best.items()},
            history=[asdict(row) for row in self.history],
        )

    def _order(self) -> list[Any]:
        """What the order of batches depends on."""
        return [self.settings.manualSeed, self.settings.batch_size, self.batches.used, self.batches.edges.tolist(),
                self.accel.world]  # fmt: skip

    def _resume(self, path: Path) -> None:
        extra = self.accel.resume(path)
        if extra.get("characters") != self.prepared.characters:
            raise AccelError(f"{path}: its character set is {extra.get('characters')!r}, the configuration's is "
                             f"{self.prepared.characters!r}")  # fmt: skip
        if extra["order"] != self._order():
            self.accel.session.warn(
                f"{path}: data, batch size, seed, buckets or processes changed since: the order of lines begins anew"
            )
        else:
            self.position = extra["position"]
        self.infeasible, self.stale, self.unreadable = extra["infeasible"], extra["stale"], extra["unreadable"]
        self.best = {name: Score(**found) for name, found in extra["best"].items()}
        self.history = [Row(**row) for row in extra["history"]]
        name = self.settings.experiment_name
        there = Exported(name, self.folder / "model", self.folder / "user_network")
        self.exported = there if all(file.is_file() for file in there.files) else None

    def _finish(self) -> None:
        """Pictures, and sentences for the report."""
        if not self.first:
            self.exported = Exported(self.settings.experiment_name, self.folder / "model", self.folder / "user_network")
            return
        if self.infeasible:
            self.accel.session.warn(
                f"{self.infeasible} times a label needed more frames than its crop gives: no gradient from it"
            )
        if self.history:
            pictures.curves(self.history, self.folder / "curves.png", write_atomically)
        if self.readings is not None:
            pictures.mistakes(self.readings, self.prepared.valid, self.folder / "mistakes.png", write_atomically)

    # -- small things --------------------------------------------------------------------------------------------

    def _board(self) -> Board:
        settings = self.settings
        self.accel.session.report.versions = versions("easyocr", "torchvision")
        return Board(
            self.folder,
            settings.num_iter,
            rows=self.history,
            writer=write_atomically,
            tensorboard=settings.tensorboard and self.first,
            progress=settings.progress and self.first,
        )

    def _rate(self) -> float:
        return float(self.accel.optimizer.param_groups[0]["lr"])

    def _agreed(self, asked: bool) -> bool:
        """Whether any process was asked to stop; all leave the loop at the same update."""
        if self.accel.world == 1:
            return asked
        votes = torch.tensor(float(asked), device=self.accel.device)
        dist.all_reduce(votes)
        return bool(votes)

    def _from_first(self, value: int) -> int:
        if self.accel.world == 1:
            return value
        told = torch.tensor(value, device=self.accel.device)
        dist.broadcast(told, src=0)
        return int(told)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C or SIGTERM: the update in progress is finished first. A second Ctrl-C stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Result", "Settings", "fit"]
