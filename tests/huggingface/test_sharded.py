"""A Trainer with FSDP2 on two ranks: the big batch's gradient, one norm, equal skips, whole files, equal resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from integrations.contract import UnsupportedRun
from integrations.huggingface import checkpoint_folders, deepspeed, versions
from integrations.huggingface.arguments import refuse_contradictions
from plugins import AccelConfig
from tests import processes, reference
from tests.core.tiny import same
from tests.huggingface.heads import batch_for, model_for
from tests.huggingface.runs import trainer_for
from tests.huggingface.sharded_ranks import CLIP, HEADS, RESUMED, SIZE, TAIL

FORMS = [f"{form}-{average}" for form, average in RESUMED]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    names = ("exact", "skipped", "resumed", "compiled", "by_launcher")
    processes.run("tests.huggingface.sharded_ranks:main", folder, 2, 500, *names)
    return torch.load(folder / "found.pt", weights_only=False)


def right(head):
    batch = batch_for(head, SIZE, uneven=True)
    return reference.gradients(model_for(head), batch, lambda model, rows: model(**rows).loss)


@pytest.mark.parametrize("head", HEADS)
def test_two_ranks_are_the_big_batch_clipped_by_the_norm_of_all_shards(head, found):
    ours = found["exact"][head]
    batch, model = batch_for(head, SIZE, uneven=True), model_for(head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(**batch).loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    assert ours["sharded"] > 0
    assert ours["norm"] == pytest.approx(norm, rel=1e-6)
    assert reference.difference(ours["gradients"], clipped) <= 1e-6
    assert reference.difference(ours["weights"], {n: p.detach() for n, p in model.named_parameters()}) <= 1e-6
    assert (ours["window"]["exact"], ours["window"]["approximate_terms"]) == (True, [])
    with torch.no_grad():
        assert ours["evaluation"] == pytest.approx(float(model.eval()(**batch).loss), rel=2e-5)
        tail = batch_for(head, TAIL, uneven=True)
        assert ours["tail"] == pytest.approx(float(model.eval()(**tail).loss), rel=2e-5)


def test_an_infinite_gradient_of_one_rank_is_skipped_on_all(found):
    ours = found["skipped"]
    assert ours["moved"] == [False, True]
    assert ours["report"]["window"]["skipped_updates"] == 1
    assert ours["report"]["ema"]["updates"] == 2


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
    last = Path(straight["folder"]) / "checkpoint-3"
    assert checkpoint_folders.problems(last) == []
    if form.startswith("FULL"):
        saved = load_file(last / "model.safetensors")
        assert all(torch.equal(saved[name], straight["end"][name]) for name in saved)
        shards = torch.load(last / "pytorch_model_fsdp.bin", weights_only=True)
        assert all(torch.equal(shards[name], straight["end"][name]) for name in straight["end"])
    else:
        (last / "pytorch_model_fsdp_0" / ".metadata").rename(last / "elsewhere")
        assert checkpoint_folders.problems(last) == ["pytorch_model_fsdp_0 is not finished"]
        (last / "elsewhere").rename(last / "pytorch_model_fsdp_0" / ".metadata")


def test_blocks_are_compiled_inside_their_shards(found):
    ours = found["compiled"]
    assert ours["report"]["decision"] == "regional", ours["report"]["reason"]
    assert 1 <= ours["report"]["graphs"] <= ours["report"]["budget"]
    assert reference.difference(ours["gradients"], right("bert-token")) <= 1e-6


def test_the_launchers_config_shards_as_the_arguments_do(found):
    ours = found["by_launcher"]
    assert ours["sharded"] > 0
    assert reference.difference(ours["gradients"], right("bert-token")) <= 1e-6


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ({"is_deepspeed_enabled": True, "stage": 3}, {}, "deepspeed: ZeRO 3 is not supported"),
        ({"is_deepspeed_enabled": True, "stage": 0}, {}, "deepspeed: ZeRO 0 is not supported"),
        ({"is_deepspeed_enabled": True}, {"memory_format": "channels_last"}, "memory_format=channels_last: "),
        ({"is_deepspeed_enabled": True}, {"plan": "plan.json"}, "plan=plan.json: "),
        ({"is_deepspeed_enabled": True}, {"precision": "bf16"}, "precision=bf16: "),
        ({"is_deepspeed_enabled": True}, {"compile": "on"}, "compile=on: .*compile_scope=regional"),
        (
            {"is_deepspeed_enabled": True},
            {"compile": "on", "compile_scope": "regional", "compile_mode": "reduce-overhead"},
            "compile_mode=reduce-overhead: ",
        ),
        ({"is_deepspeed_enabled": True}, {"accumulate": 4}, "accumulate=4: .*gradient_accumulation_steps"),
        ({"is_deepspeed_enabled": True}, {"effective_batch": 32}, "effective_batch=32: .*gradient_accumulation_steps"),
        ({"is_fsdp_enabled": True, "version": 1}, {}, "fsdp version 1: .*'version': 2.*fsdp_version: 2"),
        ({"is_distributed_loading_by_transformers": True}, {}, r"distributed_config: .*fsdp=True"),
        ({"parallel": "tp"}, {}, "parallelism_config: tp_size=2: not supported"),
        ({"is_fsdp_enabled": True, "version": 2}, {"memory_format": "channels_last"}, "memory_format=channels_last: "),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(engine, options, words, tmp_path, monkeypatch):
    trainer, _ = trainer_for("bert-token", tmp_path, 4, plug=False)
    plugin = SimpleNamespace(fsdp_version=engine.pop("version", 2))
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "fsdp_plugin", plugin)
    stage = engine.pop("stage", 2)
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(get_value=lambda name, default: stage))
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    if kind := engine.pop("parallel", None):
        parallel = SimpleNamespace(**{f"{kind}_enabled": True, f"{kind}_size": 2})
        monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", parallel, raising=False)
    for name, value in engine.items():
        setattr(trainer, name, value)
    with pytest.raises(UnsupportedRun, match=words) as error:
        refuse_contradictions(trainer, AccelConfig(**options))
    assert "\n" not in str(error.value)


def test_an_accelerate_whose_engine_counts_by_itself_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "BOUNDARY", SimpleNamespace(here=False))
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(get_value=lambda name, default: 2))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
    with pytest.raises(UnsupportedRun, match=r"accelerate.*update accelerate"):
        deepspeed.refuse(trainer, AccelConfig())
