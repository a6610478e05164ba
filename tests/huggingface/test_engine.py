"""What the plug does beside DeepSpeed's engine, without the engine: its settings, its scale, its folders."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from integrations.huggingface import checkpoint_folders
from integrations.huggingface.deepspeed import Engine
from integrations.huggingface.gradient_scaling import Scaling, Share
from integrations.refusal import UnsupportedRun


def trainer(limit: float = 1.0, fp16: bool = False, **optimizer):
    """Only what is asked of one."""
    parts = {"clip_grad": limit, "check_grad_overflow": True, "loss_scale": 1.0, **optimizer}
    held = SimpleNamespace(**{name: value for name, value in parts.items() if value is not None})
    held.state_dict = lambda: {"clip_grad": held.clip_grad, "loss_scaler": 1.0}
    engine = SimpleNamespace(optimizer=held, gradient_clipping=lambda: limit, get_global_grad_norm=lambda: 0.5)
    return SimpleNamespace(is_deepspeed_enabled=True, model_wrapped=engine, args=SimpleNamespace(fp16=fp16))


@pytest.mark.parametrize(("setting", "limit"), [("host", 1.0), ("off", 0.0), (0.25, 0.25)])
def test_the_limit_is_the_settings_for_one_run(setting, limit):
    """A file of the engine holds the limit of its own config, and not this run's."""
    host = trainer()
    optimizer = host.model_wrapped.optimizer
    engine = Engine(host, setting)
    assert (engine.clip_norm, optimizer.clip_grad) == (limit, limit)
    assert optimizer.state_dict() == {"clip_grad": 1.0, "loss_scaler": 1.0}
    engine.undo()
    assert optimizer.clip_grad == 1.0


def test_the_limit_that_another_run_s_file_brought_is_not_this_one_s():
    host = trainer(2.0)
    host.model_wrapped.optimizer.clip_grad = 0.25
    engine = Engine(host, "host")
    assert (engine.clip_norm, host.model_wrapped.optimizer.clip_grad) == (2.0, 2.0)


def test_gradients_are_checked_where_the_engine_would_not():
    host = trainer(0.0, check_grad_overflow=False)
    engine = Engine(host, "host")
    assert host.model_wrapped.optimizer.check_grad_overflow
    engine.undo()
    assert host.model_wrapped.optimizer.check_grad_overflow is False


def test_an_engine_that_checks_nothing_is_refused_but_in_fp16():
    with pytest.raises(UnsupportedRun, match="SimpleNamespace of this engine skips no update that is not finite"):
        Engine(trainer(check_grad_overflow=None), "host")
    Engine(trainer(check_grad_overflow=None, fp16=True), "host")


@pytest.mark.parametrize(("stepped", "norm"), [(True, 0.5), (False, math.nan)])
def test_a_skipped_update_has_no_norm_of_an_earlier_one(stepped, norm):
    host = trainer()
    host.model_wrapped.was_step_applied = lambda: stepped
    assert Engine(host, "host").norm == pytest.approx(norm, nan_ok=True)


def test_clipping_takes_a_norm():
    host = trainer(0.0, compute_grad_norm=False)
    engine = Engine(host, 0.5)
    assert host.model_wrapped.optimizer.compute_grad_norm
    engine.undo()
    assert not host.model_wrapped.optimizer.compute_grad_norm


@pytest.mark.parametrize("divided", [False, True])
def test_a_scaled_loss_brings_its_share_whoever_divided_it(divided):
    weight = torch.ones((), requires_grad=True)
    loss = weight * 3.0
    scaling = Scaling(trainer(loss_scale=256.0), odd=lambda: pytest.fail("another factor"))
    scaling.begin(lambda: None)
    scaling.correct(loss, Share(0.25), 4)
    ((loss / 4 if divided else loss) * 256.0).backward()
    assert float(weight.grad) == 3.0 * 256.0 * 0.25


def test_a_folder_of_the_engine_is_whole_once_it_is_named(tmp_path):
    (tmp_path / "trainer_state.json").write_text("{}")
    torch.save({}, tmp_path / "pytorch_model.bin")
    part = tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    part.parent.mkdir()
    torch.save({"weights": torch.zeros(9)}, part)
    assert checkpoint_folders.problems(tmp_path) == ["global_step2 is not finished"]
    (tmp_path / "latest").write_text("global_step2")
    assert checkpoint_folders.problems(tmp_path) == []
    part.write_bytes(part.read_bytes()[:-9])
    assert checkpoint_folders.problems(tmp_path) == [f"{part.name} is cut off"]
