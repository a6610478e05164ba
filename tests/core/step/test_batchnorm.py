from __future__ import annotations

import pytest
import torch
from torch import nn

from plugins.core.step import batchnorm
from plugins.core.step.batchnorm import Statistics, momentum_per_micro_batch
from tests.core.tiny import batches, feed, mlp, same, session_of, snapshot


def test_the_momentum_of_the_formula() -> None:
    assert momentum_per_micro_batch(0.03, 4) == pytest.approx(0.0076, abs=5e-5)
    assert momentum_per_micro_batch(0.1, 1) == pytest.approx(0.1)
    for k in (2, 4, 8):
        assert (1 - momentum_per_micro_batch(0.1, k)) ** k == pytest.approx(0.9)


def test_momentum_keeps_the_time_constant_of_an_update() -> None:
    """K moves on the same batch come to where one move of the host's momentum comes."""
    x = batches(0, [16])[0].x
    host, ours = mlp(norm=True), mlp(norm=True)
    host(x)
    rule = Statistics(ours, "momentum")
    rule.apply(4)
    for _ in range(4):
        ours(x)
    assert torch.allclose(ours.norm.running_mean, host.norm.running_mean, rtol=1e-5)
    assert torch.allclose(ours.norm.running_var, host.norm.running_var, rtol=1e-5)
    rule.apply(4)  # not compounded when the host sets training mode again
    assert ours.norm.momentum == pytest.approx(momentum_per_micro_batch(0.1, 4))
    rule.undo()
    assert ours.norm.momentum == 0.1


def test_a_cumulative_average_keeps_its_own_rule() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    Statistics(model, "momentum").apply(4)
    assert model[0].momentum is None


def test_freeze_holds_the_statistics_also_after_the_host_sets_training_mode() -> None:
    model = mlp(norm=True)
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, {"batchnorm": "freeze"})
    before = snapshot(model)
    for part in batches(0, [4, 4]):
        model.train()
        session.training_mode()
        assert model.training
        assert not model.norm.training
        feed(session, model, part)
    after = snapshot(model)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["norm.weight"], before["norm.weight"])


def test_host_changes_nothing() -> None:
    model = mlp(norm=True)
    Statistics(model, "host").apply(4)
    assert model.norm.momentum == 0.1
    assert model.norm.training


def test_keep_and_restore() -> None:
    model = mlp(norm=True)
    statistics = Statistics(model)
    statistics.restore()  # nothing kept yet
    for _ in range(2):
        before = snapshot(model)
        statistics.keep()
        model(batches(0, [4])[0].x * float("nan"))
        assert not bool(model.norm.running_mean.isfinite().all())
        statistics.restore()
        assert same(snapshot(model), before)
        model(batches(1, [4])[0].x)


def test_restore_finds_the_buffers_of_a_model_that_was_cast() -> None:
    model = mlp(norm=True)
    statistics = Statistics(model)
    statistics.keep()
    model.double()
    model.norm.running_mean.fill_(7)
    statistics.restore()
    assert not model.norm.running_mean.any()


def test_layers_without_statistics_are_not_touched() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.GroupNorm(1, 3))
    assert batchnorm.layers(model) == [model[0]]
    Statistics(model, "freeze").apply(2)
    assert model[1].training


def test_reestimate_is_the_plain_average_and_leaves_modes_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    parts = [batch.x for batch in batches(0, [4, 4, 4])]
    used = batchnorm.reestimate(model, parts, model)
    assert used == 3
    assert torch.allclose(model[0].running_mean, torch.stack([x.mean(0) for x in parts]).mean(0), atol=1e-6)
    assert torch.allclose(model[0].running_var, torch.stack([x.var(0) for x in parts]).mean(0), atol=1e-6)
    assert model[0].momentum == 0.1
    assert model[0].training
    assert model.training
    assert not model[1].training


def test_reestimate_gives_the_model_back_after_an_error() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.eval()
    with pytest.raises(ValueError):
        batchnorm.reestimate(model, [torch.zeros(4, 7)], lambda _: (_ for _ in ()).throw(ValueError()))
    assert not model[0].training
    assert model[0].momentum == 0.1


@pytest.mark.parametrize(("size", "rule", "warned"), [(8, "host", False), (7, "host", True), (7, "freeze", False)])
def test_a_small_micro_batch_is_one_warning(size: int, rule: str, warned: bool) -> None:
    from plugins.config import AccelConfig
    from plugins.core.session import RunSpec, Session

    said: list[str] = []
    model = mlp(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config, cpu = AccelConfig(batchnorm=rule), torch.device("cpu")
    session = Session(RunSpec(config, "test", model, optimizer, cpu, micro_batch=size, size=2, say=said.append))
    assert sum("BatchNorm" in line for line in said) == warned
    assert session.report.batchnorm.micro_batch_too_small == warned
    assert session.report.batchnorm.layers == 1
    session.end()
