"""The host's results.csv as curves of losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.ultralytics.losses import read_losses
from plugins.core.telemetry.losses import LossFacts

HEAD = "epoch,time,train/box_loss,train/cls_loss,metrics/mAP50(B),val/box_loss,val/cls_loss,lr/pg0\n"


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    def found(text: str) -> LossFacts:
        (tmp_path / "results.csv").write_text(text, encoding="utf-8")
        facts = LossFacts()
        read_losses(tmp_path / "results.csv", facts)
        return facts

    return found


def test_an_epoch_s_terms_are_summed(read) -> None:  # type: ignore[no-untyped-def]
    facts = read(HEAD + "1,9.5,1.5,2.5,0.1,2,3,0.01\n2,19,1,2,0.2,1.5,2.5,0.01\n")
    assert (facts.unit, facts.train, facts.valid) == ("epoch", [(1, 4.0), (2, 3.0)], [(1, 5.0), (2, 4.0)])


def test_older_hosts_pad_their_columns(read) -> None:  # type: ignore[no-untyped-def]
    facts = read("   epoch,   train/box_loss,   val/box_loss\n       1,    1.5,    2\n")
    assert (facts.train, facts.valid) == ([(1, 1.5)], [(1, 2.0)])


def test_a_run_that_was_killed_and_resumed_has_each_epoch_once(read) -> None:  # type: ignore[no-untyped-def]
    rows = "".join(f"{epoch},1,{loss},0,0,{loss},0,0\n" for epoch, loss in ((1, 4), (2, 3), (3, 9), (2, 3.5), (3, 2)))
    assert read(HEAD + rows).train == [(1, 4.0), (2, 3.5), (3, 2.0)]


def test_without_validation_there_is_no_curve_of_it(read) -> None:  # type: ignore[no-untyped-def]
    assert read("epoch,train/loss,metrics/accuracy_top1\n1,2.5,0.5\n").valid == []
    assert read(HEAD + "1,9,1,2,0,,,0\n").valid == []


def test_what_is_not_finite_stays_a_gap(read) -> None:  # type: ignore[no-untyped-def]
    assert read(HEAD + "1,9,nan,2,0,1,1,0\n2,9,1,2,0,1,1,0\n").train == [(1, None), (2, 3.0)]


@pytest.mark.parametrize("text", ["", "epoch\n", "\x00\x00", "a,b\n1,2\n", HEAD + "x,y\n", HEAD + "1\n"])
def test_a_damaged_file_is_no_curve(read, text: str) -> None:  # type: ignore[no-untyped-def]
    facts = read(text)
    assert (facts.train, facts.valid) == ([], [])


def test_no_file_leaves_the_report_as_it_is(tmp_path: Path) -> None:
    facts = LossFacts()
    read_losses(tmp_path / "absent.csv", facts)
    assert facts == LossFacts()
