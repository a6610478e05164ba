"""What a loop tells the report of its losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from plugins.errors import AccelError
from plugins.loop import run
from tests.loop.convolution import accelerated, batches, loss_of, network


def test_losses_stand_at_their_update_in_the_report(tmp_path: Path) -> None:
    model = network()
    accel = accelerated(model, plan="off", compile="off")
    for _ in range(2):
        for batch in accel.batches(batches([4, 4])):
            accel.log_loss(train=accel.training_step(lambda b: loss_of(model, b), batch))
        accel.log_loss(valid=float("nan"))
        accel.log_loss(valid=0.5)
    losses = json.loads(accel.end(tmp_path).read_text())["losses"]
    assert [at for at, _ in losses["train"]] == [1, 2, 3, 4]
    assert all(math.isfinite(loss) for _, loss in losses["train"])
    assert (losses["unit"], losses["valid"]) == ("update", [[2, None], [2, 0.5], [4, None], [4, 0.5]])
    assert "validation" in (tmp_path / "accel_report.html").read_text(encoding="utf-8")


def test_an_endless_run_keeps_so_many_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LOGGED", 10)
    accel = accelerated(network(), plan="off", compile="off")
    for n in range(1000):
        accel.log_loss(train=float(n))
    kept = accel.session.report.losses.train
    assert len(kept) <= 10
    assert kept[-1][1] == 999
    accel.end()


@pytest.mark.parametrize("value", ["low", torch.zeros(2), [1.0]])
def test_what_is_no_number_is_one_line_and_not_kept(value: object) -> None:
    accel = accelerated(network(), plan="off", compile="off")
    with pytest.raises(AccelError, match=r"log_loss: valid=.*expected one number") as refused:
        accel.log_loss(valid=value)
    assert "\n" not in str(refused.value)
    assert accel.session.report.losses.valid == []
    accel.end()
