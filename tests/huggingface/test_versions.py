"""The host's symbols: those that the plug needs are there, and the table lists what the source takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from integrations.huggingface import versions
from integrations.huggingface.patches import Held
from integrations.huggingface.versions import DEEPSPEED, TABLE
from tests.symbols import named, taken

NEEDED = [symbol for symbol in TABLE if not symbol.without]
OF_ARGUMENTS_AND_MODEL = {"gradient_accumulation_steps", "learning_rate", "use_cache", "generate", "zero_grad"}
OF_OPTIMIZER = {"step", "state_dict"}


@pytest.mark.parametrize("symbol", NEEDED, ids=[symbol.path for symbol in NEEDED])
def test_the_host_has_what_the_plug_cannot_do_without(symbol) -> None:
    assert symbol.here, f"transformers, accelerate or datasets lacks {symbol.path}, which the plug takes"


def test_the_table_lists_what_the_source_takes() -> None:
    found = set(taken("huggingface", {"transformers", "accelerate", "datasets"}))
    assert found - named((*TABLE, *DEEPSPEED)) - OF_ARGUMENTS_AND_MODEL - OF_OPTIMIZER == set()


def test_a_symbol_that_may_be_missing_says_since_when_and_what_is_done() -> None:
    assert all(symbol.since and symbol.without for symbol in TABLE if symbol.since or symbol.without)


def test_an_older_host_that_clips_is_asked_on_its_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "GRAD_NORM", SimpleNamespace(here=False))
    accelerator = SimpleNamespace(clip_grad_norm_=lambda parameters, norm: "the host's")
    trainer = SimpleNamespace(accelerator=accelerator, model="model")
    held = Held(accelerator)
    versions.hold_gradients(Held(trainer), held, lambda original, *args: f"ours, not {original(*args)}", norm=None)
    assert accelerator.clip_grad_norm_([], 1.0) == "ours, not the host's"
    held.undo()
    assert accelerator.clip_grad_norm_([], 1.0) == "the host's"


class Older:
    """The loop of a host of before 4.57, in an epoch that it resumes: counted from 0, compared with the whole epoch."""

    def __init__(self, size: int) -> None:
        self.args, self.updates = SimpleNamespace(gradient_accumulation_steps=size), list[int]()
        self.held = Held(self.args)

    def _inner_training_loop(self, steps_skipped: int, steps_in_epoch: int, mended: bool) -> None:
        args, step, left = self.args, -1, steps_in_epoch - steps_skipped
        while left > 0:
            fetched = min(args.gradient_accumulation_steps, left)
            if mended:
                versions.hold_tail(self, self.held, fetched)
            for _ in range(fetched):
                step += 1
                if (step + 1) % args.gradient_accumulation_steps == 0 or (step + 1) == steps_in_epoch:
                    self.held.undo()
                    self.updates.append(step + 1 + steps_skipped)
            left -= fetched


@pytest.mark.parametrize(
    ("size", "skipped", "epoch", "updates"),
    [(2, 4, 9, [6, 8, 9]), (3, 3, 8, [6, 8]), (3, 6, 8, [8]), (4, 4, 8, [8]), (2, 0, 3, [2, 3])],
)
def test_the_tail_of_a_resumed_epoch_is_an_update(size: int, skipped: int, epoch: int, updates: list[int]) -> None:
    host, alone = Older(size), Older(size)
    host._inner_training_loop(skipped, epoch, mended=True)
    alone._inner_training_loop(skipped, epoch, mended=False)
    assert host.updates == updates
    assert alone.updates == (updates if not skipped or epoch % size == 0 else updates[:-1])
    assert type(host.args.gradient_accumulation_steps) is int  # it is saved with every checkpoint


class Sampler:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Resuming:
    """The loop of an older host as it begins the rest of an epoch: with a loader that says that it is the first."""

    def __init__(self) -> None:
        self.sampler = Sampler()
        loader = SimpleNamespace(batch_sampler=SimpleNamespace(sampler=self.sampler), dataset=[])
        self.callback_handler = SimpleNamespace(train_dataloader=loader)

    def _inner_training_loop(self, epoch: int, steps_trained_in_current_epoch: int) -> list[int]:
        held, seen = versions.hold_order(self), list[int]()
        for number in (0, epoch + 1):
            self.sampler.set_epoch(number)
            seen.append(self.sampler.epoch)
        for one in held:
            one.undo()
        assert "set_epoch" not in vars(self.sampler)
        return seen


def test_the_rest_of_a_resumed_epoch_has_that_epoch_s_order() -> None:
    assert Resuming()._inner_training_loop(2, steps_trained_in_current_epoch=3) == [2, 3]
    assert Resuming()._inner_training_loop(2, steps_trained_in_current_epoch=0) == [0, 3]
