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


@pytest.mark.parametrize("symbol", NEEDED, ids=[symbol.path for symbol in NEEDED])
def test_the_host_has_what_the_plug_cannot_do_without(symbol) -> None:
    assert symbol.here, f"transformers, accelerate or datasets lacks {symbol.path}, which the plug takes"


def test_the_table_lists_what_the_source_takes() -> None:
    found = set(taken("huggingface", {"transformers", "accelerate", "datasets"}))
    assert found - named((*TABLE, *DEEPSPEED)) - OF_ARGUMENTS_AND_MODEL == set()


def test_a_symbol_that_may_be_missing_says_since_when_and_what_is_done() -> None:
    assert all(symbol.since and symbol.without for symbol in TABLE if symbol.since or symbol.without)


def test_an_older_host_that_clips_is_asked_on_its_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "GRAD_NORM", SimpleNamespace(here=False))
    accelerator = SimpleNamespace(clip_grad_norm_=lambda parameters, norm: "the host's")
    trainer = SimpleNamespace(accelerator=accelerator, model="model")
    held = Held(accelerator)
    versions.hold_gradients(trainer, Held(trainer), held, lambda original, model: f"ours of {model}")
    assert accelerator.clip_grad_norm_([], 1.0) == "ours of model"
    held.undo()
    assert accelerator.clip_grad_norm_([], 1.0) == "the host's"
