"""What the plug does beside DeepSpeed's engine, without the engine: its settings, its scale, its folders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from integrations.huggingface import checkpoint_folders
from integrations.huggingface.deepspeed import Engine
from integrations.huggingface.gradient_scaling import Scaling, Share


def trainer(limit: float = 1.0, **optimizer):
    """Only what is asked of one."""
    held = SimpleNamespace(**{"clip_grad": limit, "dtype": torch.float32, "loss_scale": 1.0, **optimizer})
    engine = SimpleNamespace(optimizer=held, gradient_clipping=lambda: limit)
    return SimpleNamespace(is_deepspeed_enabled=True, model_wrapped=engine)


@pytest.mark.parametrize(("setting", "limit"), [("host", 1.0), ("off", 0.0), (0.25, 0.25)])
def test_the_limit_is_the_settings_for_one_run(setting, limit):
    host = trainer()
    engine = Engine(host, setting)
    assert (engine.clip_norm, host.model_wrapped.optimizer.clip_grad) == (limit, limit)
    engine.undo()
    assert host.model_wrapped.optimizer.clip_grad == 1.0


@pytest.mark.parametrize(
    ("dtype", "norms", "checks"),
    [(torch.float32, True, False), (torch.bfloat16, True, True), (torch.float32, False, True)],
)
def test_gradients_are_checked_where_no_norm_tells(dtype, norms, checks):
    host = trainer(0.0, dtype=dtype, compute_grad_norm=norms, check_grad_overflow=False)
    engine = Engine(host, "host")
    assert host.model_wrapped.optimizer.check_grad_overflow is checks
    engine.undo()
    assert host.model_wrapped.optimizer.check_grad_overflow is False


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
    scaling.correct(loss, Share(0.25, 0.25), 4)
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
