"""Trials of a command: what their results are read as, and one search over a job whose memory is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.errors import AccelError
from plugins.find_batch import finder, trials
from plugins.find_batch.search import Outcome
from plugins.find_batch.trials import Stopped, Trials
from plugins.trial_run.launch import Ended, TrialResult
from plugins.trial_run.request import TrialRequest
from tests.trial_run.jobs import loop


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """`told(result)`: trials of a command that come to this result, and the requests that they got."""

    def of(result: TrialResult, effective_batch: int | None = None) -> tuple[Trials, list[TrialRequest]]:
        seen: list[TrialRequest] = []

        def run(command: Any, request: TrialRequest, timeout: float, limit: float) -> TrialResult:
            seen.append(request)
            request.folder.mkdir(parents=True)
            return result

        monkeypatch.setattr(trials, "run", run)
        return Trials(["python", "train.py"], tmp_path / "trials", effective_batch, 2.0), seen

    return of


def result(ended: Ended, samples: int = 8, **given: Any) -> TrialResult:
    """Of three updates of two micro-batches, 1 s each; the first took 9 s."""
    lines = [{"update": n, "seconds": 1.0 if n else 9.0, "micro_batches": 2, "samples": samples} for n in range(3)]
    return TrialResult(0, ended, [{"begun": {"host": "loop"}}, *lines], **{"peak_gib": 1.5, **given})


def test_a_trial_that_ran_has_its_peak_and_the_time_of_a_steady_sample(told) -> None:  # type: ignore[no-untyped-def]
    made, seen = told(result(Ended.COMPLETE), 16)
    found = made.measure(4, {"precision": "bf16"}, checks=("freeze",))
    assert (found.outcome, found.peak_gib, found.sample_seconds) == (Outcome.DONE, 1.5, 1.0 / 8)
    assert (seen[0].micro_batch, seen[0].checks, made.host) == (4, ("freeze",), "loop")
    assert seen[0].settings == {"compile": "off", "validate": "eager", "accumulate": 2, "precision": "bf16"}
    assert not seen[0].folder.exists()


@pytest.mark.parametrize(("effective", "wanted"), [(None, None), (4, 1), (8, 2), (64, 2)])
def test_an_update_of_a_trial_holds_what_the_runs_update_holds(told, effective, wanted) -> None:  # type: ignore[no-untyped-def]
    made, seen = told(result(Ended.COMPLETE), effective)
    made.measure(4)
    assert seen[0].settings.get("accumulate") == wanted


def test_out_of_memory_does_not_fit_and_too_few_samples_are_no_measurement(told) -> None:  # type: ignore[no-untyped-def]
    over = told(result(Ended.OUT_OF_MEMORY))[0].measure(4)
    assert (over.outcome, over.fits(100.0)) == (Outcome.OVER, False)
    short = told(result(Ended.COMPLETE, samples=6))[0].measure(4)
    assert (short.outcome, short.fits(100.0)) == (Outcome.SHORT, False)


@pytest.mark.parametrize(
    ("came", "why"),
    [
        (TrialResult(0, Ended.NO_TRAINING), "made no update of a plug's, so there is nothing to measure"),
        (result(Ended.TIMEOUT), "took longer than 600 s for 4 updates; give a longer --timeout"),
        (
            result(Ended.FAILED, stderr="Traceback\nValueError: no such data\n"),
            "failed at .*: ValueError: no",
        ),
    ],
)
def test_a_job_that_cannot_be_measured_is_one_line(told, came: TrialResult, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AccelError, match=f"command=python train.py: {why}"):
        told(came)[0].measure(4)


def test_ctrl_c_stops_the_search(told) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Stopped):
        told(result(Ended.INTERRUPTED))[0].measure(4)


MIB_A_SAMPLE = 24


def test_a_real_job_is_searched_in_trials_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is `MIB_A_SAMPLE` for each sample, held while an update is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    body = f"held = torch.ones(len(batch[0]), {MIB_A_SAMPLE} * 2**18); import time; time.sleep(0.15)"
    command = loop(tmp_path, body=body, batch=4, epochs=4)
    trials = Trials(command, tmp_path / "trials", 32, 64.0, updates=2)
    small = trials.measure(4)
    assert small.peak_gib is not None
    limit = small.peak_gib + 8 * MIB_A_SAMPLE / 1024  # of 12 samples: 8 fits, 16 does not
    trials.limit_gib = limit
    found = finder.find(trials, torch.device("cpu"), 64)
    assert found.best is not None
    assert found.best.micro_batch == 8
    assert found.best.sample_seconds is not None
    assert trials.host == "loop"
    assert list((tmp_path / "trials").iterdir()) == []
