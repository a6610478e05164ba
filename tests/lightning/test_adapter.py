"""`L.Trainer(callbacks=[AccelLightning()])` beside the host alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from plugins.errors import AccelError
from plugins.lightning import AccelLightning
from tests.lightning.runs import Module, X, Y, fit, loader, off, trainer, weights


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


def report(folder: Path) -> Any:
    return json.loads((folder / "accel_report.json").read_text())


def test_unequal_micro_batches_are_the_big_batch(tmp_path: Path) -> None:
    """14 samples in batches of 4, two an update: 8 samples, then a tail of 4 and 2."""
    module = Module()
    fit(tmp_path, module, 4, 2, AccelLightning(), max_epochs=2)
    big = Module()
    optimizer = big.configure_optimizers()
    for _ in range(2):
        for part in (slice(0, 8), slice(8, 14)):
            optimizer.zero_grad()
            nn.functional.mse_loss(big(X[part]), Y[part]).backward()
            optimizer.step()
    assert off(weights(module), weights(big)) < 1e-6
    found = report(tmp_path)["window"]
    assert (found["updates"], found["micro_batches"], found["exact"]) == (4, 8, True)


def test_without_accumulation_the_run_is_the_hosts_bit_for_bit(tmp_path: Path) -> None:
    ours, host = Module(), Module()
    fit(tmp_path, ours, 4, 1, AccelLightning(), max_epochs=2)
    fit(tmp_path, host, 4, 1, max_epochs=2)
    assert off(weights(ours), weights(host)) == 0
    assert ours.steps == host.steps


def test_losses_that_the_module_logs_under_the_usual_names_are_in_the_report(tmp_path: Path) -> None:
    class Logging(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    made = trainer(tmp_path, AccelLightning(), max_epochs=2)
    made.fit(Logging(), loader(4), loader(4))
    losses = report(tmp_path)["losses"]
    assert [at for at, _ in losses["valid"]] == [at for at, _ in losses["train"]] == [4, 8]
    assert losses["valid"][-1][1] == pytest.approx(float(made.callback_metrics["val_loss"]))


def test_a_loggers_version_has_the_report_of_its_own_fit(tmp_path: Path) -> None:
    for k in (1, 2):
        fit(tmp_path, Module(), 4, k, AccelLightning(), max_epochs=1, logger=CSVLogger(tmp_path))
    versions = [report(tmp_path / "lightning_logs" / f"version_{at}") for at in (0, 1)]
    assert [found["window"]["accumulate"] for found in versions] == [1, 2]
    fit(tmp_path, Module(), 4, 1, AccelLightning(), logger=True, fast_dev_run=True)  # a stand-in that writes nothing
    assert (tmp_path / "accel_report.json").is_file()


@pytest.mark.parametrize("setting", [{"accumulate": 2}, {"effective_batch": 8}])
def test_the_settings_say_how_many_micro_batches_an_update_has(tmp_path: Path, setting: dict[str, Any]) -> None:
    ours, host = Module(), Module()
    made = fit(tmp_path, ours, 4, 1, AccelLightning(**setting), max_epochs=1)
    fit(tmp_path, host, 4, 2, AccelLightning(), max_epochs=1)
    assert off(weights(ours), weights(host)) == 0
    assert made.accumulate_grad_batches == 1  # put back


def test_a_loss_over_other_targets_is_weighed_by_them(tmp_path: Path) -> None:
    """A loss that is a mean over the rows of y which are positive."""

    class Positive(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            rows = y[:, 0] > 0
            return {"loss": nn.functional.mse_loss(self(x)[rows], y[rows])}

    module, big = Positive(), Positive()
    fit(tmp_path, module, 4, 4, AccelLightning(weight=lambda batch: int((batch[1][:, 0] > 0).sum())), max_epochs=1)
    optimizer = big.configure_optimizers()
    big.training_step((X, Y), 0)["loss"].backward()
    optimizer.step()
    assert off(weights(module), weights(big)) < 1e-6


def test_a_window_with_a_nan_is_skipped(tmp_path: Path) -> None:
    module, start = Module(bad=1), Module()
    fit(tmp_path, module, 4, 2, AccelLightning(), max_epochs=1, max_steps=1)
    assert off(weights(module), weights(start)) == 0
    assert report(tmp_path)["window"]["skipped_updates"] == 1


def test_nonfinite_stop_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AccelError, match="nonfinite=stop"):
        fit(tmp_path, Module(bad=0), 4, 2, AccelLightning(nonfinite="stop"), max_epochs=1)


def test_clip_norm_clips_once_an_update(tmp_path: Path) -> None:
    module, big = Module(), Module()
    fit(tmp_path, module, 4, 4, AccelLightning(clip_norm=0.05), max_epochs=1)
    optimizer = big.configure_optimizers()
    nn.functional.mse_loss(big(X), Y).backward()
    torch.nn.utils.clip_grad_norm_(big.parameters(), 0.05)
    optimizer.step()
    assert off(weights(module), weights(big)) < 1e-6


def test_the_hosts_own_clip_stays(tmp_path: Path) -> None:
    ours, host = Module(), Module()
    fit(tmp_path, ours, 4, 4, AccelLightning(), max_epochs=1, gradient_clip_val=0.05)
    fit(tmp_path, host, 4, 4, AccelLightning(clip_norm=0.05), max_epochs=1)
    assert off(weights(ours), weights(host)) < 1e-7


def test_validation_sees_the_average_and_training_goes_on_from_the_raw_weights(tmp_path: Path) -> None:
    ours, host = Module(), Module()
    made = trainer(tmp_path, AccelLightning(ema=0.5), max_epochs=2, num_sanity_val_steps=0)
    made.fit(ours, loader(4), loader(14))
    plain = trainer(tmp_path / "host", max_epochs=2, num_sanity_val_steps=0)
    plain.fit(host, loader(4), loader(14))
    assert ours.seen != host.seen
    assert ours.seen[-1] == pytest.approx(float(ours.net[0].weight.sum()))  # and the average is what is left
    assert report(tmp_path)["ema"]["updates"] == 8


@pytest.mark.parametrize("options", [{}, {"ema": 0.5}, {"batchnorm": "momentum"}], ids=["plain", "ema", "batchnorm"])
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(folder: Path, epochs: int, path: Path | None = None) -> Module:
        module = Module(norm=True)
        saving = ModelCheckpoint(dirpath=folder, filename="at_{epoch}", save_top_k=-1)
        made = trainer(
            folder, AccelLightning(**options), saving, max_epochs=epochs, enable_checkpointing=True,
            accumulate_grad_batches=2,
        )  # fmt: skip
        torch.manual_seed(5)
        made.fit(module, loader(4, shuffle=True), ckpt_path=path)
        return module

    straight = run(tmp_path / "straight", 3)
    run(tmp_path / "first", 2)
    resumed = run(tmp_path / "second", 3, next((tmp_path / "first").glob("at_epoch=1*.ckpt")))
    assert off(weights(straight), weights(resumed)) == 0


def test_a_checkpoint_holds_the_hosts_keys_and_the_average(tmp_path: Path) -> None:
    module = Module()
    saving = ModelCheckpoint(dirpath=tmp_path, filename="last")
    made = trainer(
        tmp_path, AccelLightning(ema=0.5, compile="on", compile_backend="eager"), saving, max_epochs=1,
        enable_checkpointing=True,
    )  # fmt: skip
    made.fit(module, loader(4))
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == Module().state_dict().keys()
    assert off(checkpoint["state_dict"], weights(module)) == 0  # the module is left with the average
    Module.load_from_checkpoint(tmp_path / "last.ckpt")
    assert report(tmp_path)["compile"]["decision"] == "whole"
    assert report(tmp_path)["compile"]["graphs"] > 0


def test_a_checkpoint_of_the_host_alone_resumes(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="host")
    trainer(tmp_path, saving, max_epochs=1, enable_checkpointing=True).fit(Module(), loader(4))
    made = trainer(tmp_path, AccelLightning(ema=0.5), max_epochs=2)
    made.fit(Module(), loader(4), ckpt_path=tmp_path / "host.ckpt")
    assert made.global_step == 8


def test_what_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]

    for module, words in ((Manual(), "automatic_optimization=False"), (Two(), "optimizers")):
        with pytest.raises((AccelError, RuntimeError), match=words):
            fit(tmp_path, module, 4, 1, AccelLightning(), max_epochs=1)
    with pytest.raises(AccelError, match="not a multiple"):
        fit(tmp_path, Module(), 4, 1, AccelLightning(effective_batch=6), max_epochs=1)
    with pytest.raises(AccelError, match="acumulate"):
        AccelLightning(acumulate=2)


def test_an_error_in_the_run_leaves_nothing_on_the_trainer(tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise ValueError("the user's")
            return super().training_step(batch, index)

    module = Fails()
    made = trainer(tmp_path, AccelLightning(accumulate=3, compile="on", compile_backend="eager"), max_epochs=1)
    with pytest.raises(ValueError, match="the user's"):
        made.fit(module, loader(4))
    assert made.accumulate_grad_batches == 1
    assert "train_step_context" not in vars(made.precision_plugin)
    assert "_compiled_call_impl" not in vars(module) or vars(module)["_compiled_call_impl"] is None


def test_two_fits_with_one_callback(tmp_path: Path) -> None:
    plug = AccelLightning(accumulate=2)
    for _ in range(2):
        trainer(tmp_path, plug, max_epochs=1).fit(Module(), loader(4))
    assert plug.report["window"]["updates"] == 2


def test_evaluation_and_prediction_do_not_need_the_plug(tmp_path: Path) -> None:
    made = trainer(tmp_path, AccelLightning(ema=0.5))
    made.validate(Module(), loader(4), verbose=False)
    assert not (tmp_path / "accel_report.json").exists()


def test_a_trial_sees_the_weights_and_leaves_nothing_behind(tmp_path: Path) -> None:
    class Keeps(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            self.seen.append(float(loss))
            return loss

    module, found = Keeps(norm=True), list[torch.Tensor]()

    class Tries(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            plug = next(c for c in trainer.callbacks if isinstance(c, AccelLightning))
            layout = plug._of_fit.layout.at((batch, batch_idx))
            before = weights(pl_module), pl_module.steps, len(pl_module.seen), dict(trainer.logged_metrics)
            found.append(layout.loss())
            assert off(weights(pl_module), before[0]) == 0
            assert (pl_module.steps, len(pl_module.seen), dict(trainer.logged_metrics)) == before[1:]

    trainer(tmp_path, AccelLightning(), Tries(), max_epochs=1).fit(module, loader(4))
    assert [float(loss) for loss in found] == module.seen
    assert found[0].requires_grad
