"""Memory that runs out in `fit`: it ends as the run whose forwards were as small from the start."""

from __future__ import annotations

import json

import pytest
import torch

from plugins.easyocr import fit, training
from plugins.errors import AccelError
from tests import reference
from tests.short import TOLD, Short

SILENT = {"say": lambda line: None}
UPDATES, K = 8, 2


def ran(tiny, monkeypatch, name, short=None, limit=None, resume=False):
    short = short or Short()
    read, begin = training.read, training.Run.train

    def train(self, *args):
        if limit is not None:
            self.accel.session.rescue.load_state_dict({"micro_batch": limit})
        return begin(self, *args)

    options = {
        **tiny, "num_iter": UPDATES, "valInterval": UPDATES, "optim": False, "lr": 0.1, "output": tiny["output"] + name,
        "accel": {"precision": "fp32", "plan": "off", "accumulate": K, "batchnorm": "freeze"},
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(training, "read", lambda model, images: short(read(model, images)))
        patch.setattr(training.Run, "train", train)
        return fit(options, resume=resume, **SILENT)


def weights(result):
    return torch.load(result.folder / "last.pt", weights_only=True)["model"]


@pytest.mark.parametrize(("update", "backward"), [(1, True), (7, False), (8, True)])
def test_the_run_equals_that_with_the_smaller_forwards_from_the_start(tiny, monkeypatch, update, backward):
    short = Short(most=2, after=K * (update - 1) + 1, backward=backward)
    saved = ran(tiny, monkeypatch, "_saved", short)
    right = ran(tiny, monkeypatch, "_right", limit=2)
    assert short.failed == 1
    assert reference.difference(weights(saved), weights(right)) < 1e-6
    facts = json.loads(saved.report.read_text())
    assert facts["memory"]["out_of_memory"] == {"count": 1, "update": update - 1, "micro_batch": 2}
    assert facts["window"]["updates"] == UPDATES


def test_what_cannot_be_smaller_is_saved_where_the_window_began(tiny, monkeypatch):
    straight = ran(tiny, monkeypatch, "_straight")
    with pytest.raises(AccelError, match=r"out of memory at update 3 .* last.pt holds them"):
        ran(tiny, monkeypatch, "_short", Short(most=0, after=7))
    again = ran(tiny, monkeypatch, "_short", resume=True)
    assert reference.difference(weights(again), weights(straight)) == 0


def test_weights_of_an_optimizer_s_step_that_does_not_fit_are_not_saved(tiny, monkeypatch):
    def refuses(*args):
        raise torch.OutOfMemoryError(TOLD)

    saved = []
    monkeypatch.setattr(training.Run, "_save", saved.append)
    monkeypatch.setattr("torch.optim.Adadelta.step", refuses)
    with pytest.raises(AccelError, match="in the optimizer's step of update 0; some weights may have it"):
        ran(tiny, monkeypatch, "_step")
    assert not saved
