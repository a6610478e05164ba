"""The training loop of `fit`: micro-batches through one `Accelerated`, validated as the Reader reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from integrations.easyocr import optimizer
from integrations.easyocr.checkpointing import Result, Standing
from integrations.easyocr.labels import ctc_loss
from integrations.easyocr.network import read
from integrations.easyocr.prepare import Prepared
from integrations.easyocr.scoring import score
from integrations.easyocr.stream import MicroBatch, loader
from integrations.easyocr.tensorboard_log import Board, Pace, Row
from integrations.shared.bucketing import choose_edges
from plugins.config import AccelConfig
from plugins.core.checkpoint.atomic_file import sweep, write_atomically
from plugins.core.step.rescue import OutOfMemory
from plugins.core.step.update import NonFiniteGradient
from plugins.core.system import devices
from plugins.core.system.distributed import any_rank, from_first
from plugins.core.system.signals import asked_to_stop
from plugins.core.telemetry.report import versions
from plugins.errors import AccelError
from plugins.loop import Accelerated
from plugins.loop.micro_batches import Part

WIDTH_STEP = 8  # px; bucket edges are its multiples
MOST_BUCKETS = 16  # shapes of an eager run
ROOM = 2  # graphs of the compile budget that are left for partial batches
SHOW_EVERY = 10  # updates
DIVERGED = 100  # skipped updates in a row, after which no further one is worth its time


class Run:
    """One training; `train` is the whole of it.

    Args:
        prepared: lines, characters, network and its first weights.
        config: with this plug's own defaults filled in.
        rank: of this process; the first one shows, validates and writes.
        say: takes the lines for the user.
    """

    def __init__(self, prepared: Prepared, config: AccelConfig, rank: int, say: Callable[[str], None]) -> None:
        self.prepared, self.settings, self.folder = prepared, prepared.settings, prepared.folder
        self.rank, self.first = rank, rank == 0
        self.model = prepared.model.to(devices.own())
        self.accel = Accelerated(
            self.model,
            optimizer.optimizer(self.model.parameters(), self.settings),
            micro_batch=self.settings.batch_size,
            schedule=optimizer.schedule(self.settings),
            host_clip_norm=self.settings.grad_clip,
            dims=(3,),
            tunes=True,
            host="easyocr",
            say=say if self.first else lambda line: None,
            config=config,
        )
        edges = self.accel.session.report.shapes.buckets = self._edges(config)
        self.batches = prepared.batches(edges)
        self.at = Standing(prepared, write_atomically)
        self.pace = Pace()
        self.validated = -1  # the update of the last validation
        self._window_began = 0  # the position

    def _edges(self, config: AccelConfig) -> list[int]:
        """The widths in px that batches are padded to."""
        widths = self.prepared.lines.widths()
        widest = max(widths)
        if config.buckets == "auto":
            compiled = self.accel.session.may_compile
            most = max(1, config.recompile_budget - ROOM) if compiled else MOST_BUCKETS
            return choose_edges(widths, most, WIDTH_STEP)
        if config.buckets == "off":
            return [max(widest, self.settings.imgW)]
        last = min((edge for edge in config.buckets if edge >= widest), default=widest)
        return [*(edge for edge in config.buckets if edge < widest), last]

    def train(self, start: Path | None, own: bool = True) -> Result:
        """Trains, and leaves every file of the experiment folder, also when it stops early.

        `start`: the checkpoint to go on from, which is this folder's `own` or another run's.
        """
        try:
            if start is not None:
                self._resume(start, own)
            if self.first:
                sweep(self.folder)
            for note in self.prepared.notes:
                self.accel.session.warn(note)
            board = self._board()
        except BaseException:
            self.accel.end()
            raise
        try:
            stopped = self._loop(board)
            if self.first:
                self._save()
            if stopped != "interrupted" and self.validated != self.accel.updates:
                with asked_to_stop():  # what was trained is saved; the validation is finished all the same
                    self._validate(board)
            facts = self.accel.session.report.window
            if stopped == "diverged":
                self.accel.session.warn(
                    f"training ended at update {self.accel.updates} of {self.settings.num_iter}: it diverged, the last "
                    f"{DIVERGED} updates were all skipped; lower lr={self.settings.lr} or grad_clip"
                )
            if facts.skipped_updates and not facts.updates:
                self.accel.session.warn("no update was made: every gradient was not finite; the weights are unchanged")
            if lost := self.prepared.lost_told:
                self.accel.session.warn(lost)
                self.prepared.notes.append(lost)
            if self.at.infeasible:
                self.accel.session.warn(
                    f"{self.at.infeasible} times a label needed more frames than its crop gives: no gradient from it"
                )
            if self.first:
                self.at.draw(None if stopped == "interrupted" else self.accel.device)
        except OutOfMemory as error:
            self.at.position = self._window_began
            if self.first:
                self._save()
            raise AccelError(f"{error}; last.pt holds them") from None
        except NonFiniteGradient as error:
            raise AccelError(f"nonfinite=stop: {error}; the last save is untouched") from None
        except OSError as error:  # a full disk, a folder in a file's place: what was saved before is untouched
            if not error.filename:
                raise
            raise AccelError(f"{error.filename}: {error.strerror}; what was saved before is untouched") from None
        finally:
            board.close()
            losses = self.accel.session.report.losses
            losses.train = [(row.update, row.train_loss) for row in self.at.history]
            losses.valid = [(row.update, row.valid_loss) for row in self.at.history]
            report = self.accel.end(self.folder if self.first else None)
        return self.at.result(self.accel.updates, stopped, report)

    def _loop(self, board: Board) -> str:
        """Updates until the end of the training; returns why it stopped."""
        settings, accel = self.settings, self.accel
        if accel.updates >= settings.num_iter:
            return "num_iter"
        accel.train()
        with asked_to_stop() as asked:
            for batch in self._stream():
                if self._micro_batch(batch) is None:
                    continue
                if self.first and accel.updates % SHOW_EVERY == 0:
                    board.training(accel.updates, self.pace.mean_loss, self._rate(), self.pace.speed)
                if accel.updates % settings.valInterval == 0:
                    self._validate(board)
                    if settings.patience and self.at.stale >= settings.patience:
                        return "patience"
                if accel.session.none_finite(DIVERGED):
                    return "diverged"
                if accel.updates >= settings.num_iter:
                    break  # before another batch is waited for
                if any_rank(asked.is_set(), accel.device):
                    return "interrupted"
        return "num_iter"

    def _stream(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches from where the run stands: every `world`-th of the common order, without end."""
        world = self.accel.world
        mine = islice(self.batches.from_position(self.at.position * world), self.rank, None, world)
        return iter(loader(self.prepared.lines, mine, self.settings.workers, pin=devices.pins(self.accel.device)))

    def _micro_batch(self, batch: MicroBatch) -> Any:
        """Forward and backward; the update's outcome where this one closed a window, else None."""
        accel, at = self.accel, self.at
        if accel.session.window.empty:
            self._window_began = at.position
        at.position += 1
        at.infeasible += batch.infeasible
        for line in at.lost(batch.unreadable):
            accel.session.warn(line)
        if not len(batch):
            return self._nothing()
        left = (self.settings.num_iter - accel.updates) * accel.accumulate
        accel.tune(self._trial(batch), left, batch.images.shape)
        padding = batch.padding * batch.images.shape[2]
        loss, outcome = accel.run_parts(partial(self._parts, batch), batch.images, padding=padding)
        self.pace.add(loss, len(batch))
        return outcome

    def _parts(self, batch: MicroBatch) -> list[Part]:
        """(forward, samples) of the micro-batch's parts, each as large as one forward may be."""
        parts = batch.parts(self._most_px, limit=self.accel.session.rescue.limit)
        return [(partial(self._forward, part), len(part)) for part in parts]

    def _forward(self, part: MicroBatch) -> Tensor:
        with self.accel.autocast():
            return self._loss(part)

    def _loss(self, part: MicroBatch) -> Tensor:
        """The network in the caller's autocast; CTC leaves it."""
        logits = read(self.model, self.accel.place(part.images))
        return ctc_loss(logits, part.classes.to(self.accel.device), part.lengths)

    def _trial(self, batch: MicroBatch) -> Callable[[], Tensor]:
        """The loss that plans are compared by: of the micro-batch's first part, one size of it for all of them."""
        part = next(batch.parts(self._most_px, limit=self.accel.session.rescue.limit))
        return lambda: self._loss(part)

    @property
    def _most_px(self) -> int:
        return self.settings.most_px(half=self.accel.dtype is not None)

    def _nothing(self) -> Any:
        """A micro-batch whose pictures were all lost: skipped alone; among ranks it counts, with no weight."""
        if len(self.at.unreadable) >= self.batches.lines_per_epoch:
            raise AccelError(f"train_data: none of its pictures can be decoded, such as {self.at.unreadable[0]}")
        if self.accel.world == 1:
            return None
        touched = torch.stack([p.sum() for p in self.model.parameters() if p.requires_grad])
        return self.accel.backward(touched.sum() * 0.0, weight=0)

    def _validate(self, board: Board) -> None:
        """Reads the validation lines as the Reader does; rank 0 scores, saves and tells the others."""
        if self.first:
            with self.accel.validation() as model:
                readings = self.prepared.read(model, self.accel.device)
            for line in self.at.lost(readings.unreadable):
                self.accel.session.warn(line)
            found = score(readings.texts, readings.labels)
            row = Row(
                self.accel.updates,
                self.batches.locate(self.at.position * self.accel.world)[0],
                self.pace.mean_loss,
                readings.loss,
                found.accuracy,
                found.similarity,
                self._rate(),
                self.pace.speed,
                self.at.infeasible,
            )
            board.validated(row, readings.samples(self.prepared.valid))
            self.at.keep(found, self.accel.weights, readings)
        self.validated = self.accel.updates
        self.pace.reset()
        if self.first:
            self._save()
        self.at.stale = from_first(self.at.stale, self.accel.device)

    def _save(self) -> None:
        if self.at.exported is None:  # stopped before the first validation: the Reader gets what there is
            self.at.export(self.accel.weights())
        self.accel.save(self.folder / "last.pt", order=self._order(), pace=self.pace.state(), **self.at.state())

    def _order(self) -> list[Any]:
        """What the order of batches depends on."""
        seed, size = self.settings.manualSeed, self.settings.batch_size
        return [seed, size, self.batches.used, self.batches.edges.tolist(), self.accel.world]

    def _resume(self, path: Path, own: bool) -> None:
        extra = self.accel.resume(path)
        there, here = extra.get("characters"), self.prepared.characters
        if there != here:
            raise AccelError(f"{path}: its character set is {there!r}, the configuration's is {here!r}")
        self.at.load(extra, own)
        self.pace.load(extra.get("pace", {"loss": 0.0, "samples": 0}))
        if changed := self.at.other_steps(extra):
            self.accel.session.warn(f"{path}: the optimizer goes on as it was saved, with {changed}")
        self.validated = self.at.history[-1].update if self.at.history else -1
        if self.accel.updates >= self.settings.num_iter:
            self.accel.session.warn(
                f"{path}: is at update {self.accel.updates} of num_iter={self.settings.num_iter} already: nothing is "
                "left to train"
            )
        if extra["order"] != self._order():
            self.at.position = 0
            self.accel.session.warn(
                f"{path}: data, batch size, seed, buckets or processes changed since: the order of lines begins anew"
            )

    def _board(self) -> Board:
        self.accel.session.report.versions = versions("easyocr", "torchvision")
        return Board(
            self.folder,
            self.settings.num_iter,
            rows=self.at.history,
            writer=write_atomically,
            warn=self.accel.session.warn,
            tensorboard=self.settings.tensorboard and self.first,
            progress=self.settings.progress and self.first,
        )

    def _rate(self) -> float:
        return float(self.accel.optimizer.param_groups[0]["lr"])
