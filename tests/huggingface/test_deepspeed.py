"""A Trainer with DeepSpeed on two ranks, ZeRO 1 and 2: the big batch's updates, their average, equal skips and resumes.

Needs the package `deepspeed`, see docs/scaling.md.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integrations.huggingface import checkpoint_folders
from integrations.huggingface.versions import DEEPSPEED
from integrations.versions import missing
from tests import processes, reference
from tests.core.tiny import same
from tests.huggingface.heads import batch_for, model_for

pytest.importorskip("deepspeed")

from tests.huggingface.deepspeed_ranks import CLIP, DECAY, ENVIRONMENT, HEADS, RATE, RESUMED, ROWS, STAGES

FORMS = [f"{stage}-{average}" for stage, average in RESUMED]
WINDOWS = ((0, 12), (12, ROWS))
"""The rows of an epoch's updates."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    names = ("exact", "by_config", "by_launcher", "own_loss", "limited", "skipped", "scaled")
    names += ("buckets", "compiled", "checkpointed", "twice", "resumed")
    processes.run("tests.huggingface.deepspeed_ranks:main", folder, 2, 500, *names, **ENVIRONMENT)
    return torch.load(folder / "found.pt", weights_only=False)


class Right:
    """Plain big batches on one process, an update each, for so many epochs of these windows."""

    def __init__(self, head, epochs, clip_norm=math.inf, windows=WINDOWS, size=ROWS):
        batch, model = batch_for(head, size, uneven=True), model_for(head)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        self.losses, self.norms, self.weights = [], [], model.state_dict()
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        for at, (start, stop) in enumerate(windows * epochs, start=1):
            optimizer.zero_grad()
            loss = model(**{name: value[start:stop] for name, value in batch.items()}).loss
            loss.backward()
            self.losses.append(float(loss.detach()))
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
            optimizer.step()
            decay = min(DECAY, (1 + at) / (10 + at))
            self.average = {name: decay * self.average[name] + (1 - decay) * p for name, p in live(model).items()}


def live(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("head", HEADS)
def test_two_ranks_are_the_big_batch_tail_and_average_included(head, stage, found):
    ours, right = found["exact"][f"{head}-{stage}"], Right(head, 2, CLIP)
    assert reference.difference(ours["weights"], right.weights) <= 1e-6
    assert reference.difference(ours["average"], right.average) <= 1e-6
    assert ours["losses"] == pytest.approx(right.losses, rel=2e-6)
    assert ours["norms"] == pytest.approx(right.norms, rel=1e-5)
    report = ours["report"]
    assert (report["window"]["updates"], report["window"]["partial_windows"]) == (4, 2)
    assert (report["window"]["exact"], report["window"]["approximate_terms"]) == (True, [])
    assert report["gradients"]["clipped_fraction"] == sum(norm > CLIP for norm in right.norms) / 4


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("head", HEADS)
def test_the_average_is_evaluated(head, stage, found):
    model = model_for(head)
    model.load_state_dict(Right(head, 2, CLIP).average, strict=False)
    with torch.no_grad():
        right = float(model.eval()(**batch_for(head, ROWS, uneven=True)).loss)
    assert found["exact"][f"{head}-{stage}"]["evaluation"] == pytest.approx(right, rel=2e-5)


@pytest.mark.parametrize("way", ["by_config", "by_launcher"])
def test_the_engine_may_come_from_elsewhere(way, found):
    assert reference.difference(found[way]["weights"], Right("bert-token", 2).weights) <= 1e-6
    assert found[way]["engine"] == "DeepSpeedEngine"


def test_the_engine_has_what_the_plug_cannot_do_without():
    assert missing(DEEPSPEED) == []


def test_one_line_says_what_is_off(found):
    report = found["exact"]["bert-token-1"]["report"]
    (line,) = report["warnings"]
    assert line.startswith("deepspeed: ")
    assert "\n" not in line
    assert report["compile"]["decision"] == "eager"


def test_a_users_loss_is_the_big_batchs(found):
    ours = found["own_loss"]
    assert reference.difference(ours["weights"], Right("bert-token", 2).weights) <= 1e-6
    assert ours["report"]["window"]["approximate_terms"] == []


@pytest.mark.parametrize(("name", "limit", "left"), [("plug", CLIP, 0.0), ("off", math.inf, CLIP)])
def test_the_settings_norm_is_the_engines_for_one_run(name, limit, left, found):
    ours = found["limited"][name]
    assert reference.difference(ours["weights"], Right("bert-token", 1, limit).weights) <= 1e-6
    assert ours["left"] == left
    assert ours["report"]["gradients"]["clip_norm"] == (None if limit == math.inf else limit)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_an_infinite_gradient_of_one_rank_is_skipped_on_all(name, found):
    ours = found["skipped"][name]
    assert ours["moved"] == [False, True]
    assert ours["finite"]
    assert ours["report"]["window"]["skipped_updates"] == 1
    assert ours["report"]["ema"]["updates"] == 2


def test_an_infinite_gradient_stops_where_it_is_to_stop(found):
    ours = found["skipped"]["stop"]
    assert "nonfinite=stop" in ours["refused"]
    assert ours["finite"]
    assert ours["report"]["window"]["updates"] == 1


def test_the_engines_own_scale_of_the_loss_is_seen(found):
    ours, right = found["scaled"], Right("bert-token", 1)
    weights = {name: value.float() for name, value in ours["weights"].items() if value.is_floating_point()}
    assert reference.difference(weights, {name: right.weights[name] for name in weights}) <= 1e-3
    assert ours["report"]["window"]["approximate_terms"] == []


def test_both_ranks_train_on_one_length_a_step(found):
    first, second = found["buckets"]["shapes"]
    assert [shape[1] for shape in first] == [shape[1] for shape in second]
    assert {shape[1] for shape in first} == {4, 8, 12}
    right = Right("bert-token", 1, windows=((0, 23),), size=23)
    assert reference.difference(found["buckets"]["weights"], right.weights) <= 1e-6


def test_blocks_are_compiled_inside_of_the_engine(found):
    ours = found["compiled"]
    assert ours["report"]["decision"] == "regional", ours["report"]["reason"]
    assert 1 <= ours["report"]["graphs"] <= ours["report"]["budget"]
    assert reference.difference(ours["weights"], Right("bert-token", 1).weights) <= 1e-6


def test_activation_checkpointing_is_exact_inside_of_the_engine(found):
    assert found["checkpointed"]["report"]["checkpointing"].startswith("on: 2 of 2")
    assert reference.difference(found["checkpointed"]["weights"], Right("bert-token", 1).weights) <= 1e-6


def test_the_best_checkpoint_is_loaded_at_the_end_of_both_runs(found):
    ours = found["twice"]
    saved = load_file(Path(ours["best"]) / "model.safetensors")
    for name, value in saved.items():
        assert torch.equal(ours["first"][name], value)
        assert torch.equal(ours["second"][name], value)


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_is_the_straight_one_bit_for_bit(form, found):
    straight, again = found["resumed"][form]
    assert same(again["weights"], straight["weights"])
    assert same(again["end"], straight["end"])
    assert again["losses"] == straight["losses"]
    assert again["evaluations"] == straight["evaluations"]


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_are_complete_and_hold_the_weights_that_were_evaluated(form, found):
    straight, _ = found["resumed"][form]
    last = Path(straight["folder"]) / "checkpoint-4"
    assert checkpoint_folders.problems(last) == []
    saved = load_file(last / "model.safetensors")
    engines = torch.load(last / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    assert all(torch.equal(saved[name], straight["end"][name]) for name in saved)
    assert all(torch.equal(engines[name], straight["end"][name]) for name in straight["end"])
    (last / "latest").rename(last / "elsewhere")
    assert checkpoint_folders.problems(last) == ["global_step4 is not finished"]
    (last / "elsewhere").rename(last / "latest")
