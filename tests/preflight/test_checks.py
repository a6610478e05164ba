"""Each verdict names the fault that was planted, and none fails on a healthy job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from plugins.preflight import compiling, gradients, learning, precision, repeating, resources, speed
from plugins.preflight.checks import CHECKS, runs
from plugins.preflight.trials import Trials
from plugins.preflight.verdict import Finding, Verdict

Build = Callable[..., Trials]
MODEL = """type("Net", (nn.Module,), dict(
    __init__=lambda self: (nn.Module.__init__(self), setattr(self, "a", nn.Linear(8, 16)),
                           setattr(self, "b", nn.Linear(16, 2)), setattr(self, "side", nn.Linear(8, 2)), None)[-1],
    forward=lambda self, x: {forward}))()"""
NORMED = "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))"


def model(forward: str) -> str:
    return MODEL.format(forward=forward)


def of(found: Finding, verdict: Verdict, *words: str) -> None:
    assert found.verdict is verdict, found
    for word in words:
        assert word in f"{found.figure}; {found.advice}"


def test_no_verdict_fails_on_a_healthy_job(job: Build) -> None:
    trials = job(model=model("self.b(self.a(x).tanh()) + self.side(x)"))
    found = {one.check: one for one in (check(trials) for check in CHECKS)}
    assert [one for one in found.values() if one.verdict is Verdict.FAIL] == []
    skipped = [one.check for one in found.values() if one.verdict is Verdict.SKIP]
    assert skipped == ["learning rate scan", "evaluation that keeps all logits"]
    for passed in ("accumulated gradient equals the big batch's", "compiled equals eager", "graph breaks"):
        assert found[passed].verdict is Verdict.PASS
    assert len(found) == len(CHECKS) == 21


# -- what was planted, and the verdict on it -------------------------------------------------------------------------


def test_a_detached_branch_is_named_by_its_parameters(job: Build) -> None:
    trials = job(model=model("self.b(self.a(x).tanh()) + self.side(x).detach()"))
    of(gradients.reach(trials), Verdict.FAIL, "2 of 6 got none", "side.weight, side.bias")


def test_a_branch_of_no_weight_is_named(job: Build) -> None:
    trials = job(model=model("self.b(self.a(x).tanh()) + 0 * self.side(x)"))
    of(gradients.reach(trials), Verdict.WARN, "2 of 6 are zero: side.weight")


def test_parameters_that_the_optimizer_lacks_are_named(job: Build) -> None:
    lacking = "optimizer = torch.optim.SGD(model.b.parameters(), lr=0.1); accel = Accelerated(model, optimizer)"
    trials = job(model=model("self.b(self.a(x).tanh()) + self.side(x)"), before=lacking)
    of(gradients.reach(trials), Verdict.WARN, "4 are in no group of the optimizer: a.weight")


def test_a_model_that_branches_on_data_is_named_by_its_line(job: Build) -> None:
    trials = job(model=model("self.b(self.a(x).tanh()) if self.side(x).mean() > 0 else self.b(self.a(x))"))
    of(compiling.graph_breaks(trials), Verdict.WARN, "train.py:", "torch.where")
    assert compiling.equals_eager(trials).verdict is Verdict.PASS


def test_shapes_past_the_budget_of_graphs_fail(job: Build) -> None:
    trials = job(
        options="accumulate=2, recompile_budget=1, dynamic='static'",
        body="batch = [batch[0].repeat(1 + accel.updates % 3, 1), batch[1].repeat(1 + accel.updates % 3)]",
    )
    of(compiling.budget(trials), Verdict.FAIL, "of 1", "buckets")


def test_a_model_compiled_by_its_owner_is_said(job: Build) -> None:
    trials = job(before="accel = Accelerated(torch.compile(model, backend='eager'), optimizer)")
    of(precision.placed(trials), Verdict.WARN, "compiled by its owner")
    of(compiling.equals_eager(trials), Verdict.SKIP, "owner")


def test_a_rate_100_times_too_high_fails(job: Build) -> None:
    assert learning.learning_rate(job(options="")).verdict is Verdict.PASS
    trials = job(lr=30, options="")
    of(learning.learning_rate(trials), Verdict.FAIL, "the loss went from", "lower it")


def test_a_rate_at_which_nothing_stays_finite_fails(job: Build) -> None:
    trials = job(lr=1e30, options="", model="nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))")
    of(learning.learning_rate(trials), Verdict.FAIL, "not finite")
    of(learning.loss_falls(trials), Verdict.FAIL, "not finite")


def test_an_effective_batch_that_the_plug_has_multiplied_asks_for_its_rate(job: Build) -> None:
    of(learning.learning_rate(job(options="accumulate=4")), Verdict.WARN, "4 times the loop's own", "lr_scale")
    assert learning.learning_rate(job(options="accumulate=4, lr_scale='linear'")).verdict is Verdict.PASS


def test_labels_that_are_the_wrong_way_round_make_the_loss_rise(job: Build) -> None:
    trials = job(step="accel.training_step(lambda batch: -loss_of(batch), batch)", options="")
    assert learning.loss_falls(trials).verdict is Verdict.PASS  # towards minus infinity: a loss that falls
    step = "factor[0] *= 1.1; accel.training_step(lambda b: loss_of(b) * factor[0], batch)"
    trials = job(before="factor = [1.0]", options="", step=step, lr=1e-4)
    of(learning.loss_falls(trials), Verdict.FAIL, "lower the learning rate")


def test_a_scan_advises_the_rate_at_which_the_loss_falls_most(job: Build) -> None:
    trials = job(lr=0.01, options="", rates=(0.1, 1.0, 10.0))
    of(learning.scan(trials), Verdict.WARN, "a rate of 0.1 (x10)", "x0.1: ")
    assert learning.scan(job(lr=0.3, options="", rates=(0.01, 1.0, 1e39))).verdict is Verdict.PASS


def test_a_schedule_that_is_stepped_every_micro_batch_fails(job: Build) -> None:
    parts = {"before": "schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 40)"}
    trials = job(**parts, step="accel.training_step(loss_of, batch); schedule.step()", updates=8)
    of(learning.warm_up(trials), Verdict.FAIL, "in 8 updates", "2 times too fast")


def test_a_warm_up_is_counted_in_updates(job: Build) -> None:
    rising = "schedule=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)"
    of(learning.warm_up(job(options=f"accumulate=2, {rising}")), Verdict.PASS, "rises for 5 updates, 0.03 -> 0.3")


def test_a_loader_that_sleeps_is_named(job: Build) -> None:
    slow = "lambda rows: (time.sleep(0.3), torch.utils.data.default_collate(rows))[1]"
    found = speed.loader(job(before=f"import time; loader.collate_fn = {slow}", updates=6))
    assert found.verdict in (Verdict.WARN, Verdict.FAIL)
    assert "waiting an update" in found.figure
    assert "workers" in found.advice
    assert speed.loader(job(body="import time; time.sleep(0.02)")).verdict is Verdict.PASS


def test_reads_of_the_host_are_counted_by_line(job: Build) -> None:
    trials = job(step="loss = accel.training_step(loss_of, batch); seen = loss.item() + loss.item()")
    found = speed.host_reads(trials)
    of(found, Verdict.PASS, "1 a micro-batch: train.py:", "CPU")  # the second micro-batch's come after its update
    assert "0 a micro-batch" in speed.host_reads(job()).figure


def test_reads_are_counted_of_a_loss_that_a_number_multiplies(job: Build) -> None:
    """As the Trainer's: autograd saves the number, and torch hands it to a mode as no tensor."""
    trials = job(step="loss = loss_of(batch) * 1; accel.backward(loss, weight=len(batch[0]))", updates=4)
    assert runs(trials).verdict is Verdict.PASS
    of(speed.host_reads(trials), Verdict.PASS, "0 a micro-batch")


def test_a_seed_that_does_not_repeat_fails(job: Build) -> None:
    trials = job(seed="__import__('time').time_ns() % 2**31")
    of(repeating.seeds(trials), Verdict.FAIL, "apart", "seed")
    assert repeating.resume(trials).verdict is Verdict.SKIP


def test_state_that_no_checkpoint_holds_is_seen_by_the_resume(job: Build) -> None:
    assert repeating.resume(job()).verdict is Verdict.PASS
    hidden = "model[0].register_buffer('scale', torch.ones(1), persistent=False)"
    step = "accel.training_step(lambda b: loss_of(b) * model[0].scale.sum(), batch)"
    trials = job(before=hidden, step=f"model[0].scale.mul_(0.9); {step}")
    of(repeating.resume(trials), Verdict.FAIL, "apart in 3 updates", "register_buffer")
    of(repeating.resume(job(before=hidden, step=step)), Verdict.PASS, "equal in 3 updates")  # as built anew


def test_batchnorm_on_tiny_micro_batches_fails_and_small_ones_warn(job: Build) -> None:
    of(precision.batchnorm(job(model=NORMED, batch=2)), Verdict.FAIL, "1 layers see 2 samples")
    of(precision.batchnorm(job(model=NORMED, batch=4)), Verdict.WARN, "see 4 samples")
    assert precision.batchnorm(job(model=NORMED, batch=8)).verdict is Verdict.PASS
    assert precision.batchnorm(job(model=NORMED, batch=2, options="batchnorm='freeze'")).verdict is Verdict.PASS


def test_batchnorm_left_in_eval_mode_fails(job: Build) -> None:
    trials = job(model=NORMED, batch=8, before="model.eval()")
    of(precision.batchnorm(trials), Verdict.FAIL, "eval mode", "accel.train()")


@pytest.mark.parametrize("body", ["loss / 2", "loss * 0.5"])
def test_a_double_division_by_k_fails(job: Build, body: str) -> None:
    trials = job(step=f"loss = loss_of(batch); accel.backward({body}, weight=len(batch[0]))")
    of(gradients.exact(trials), Verdict.FAIL, "divided by 2")


def test_a_division_by_the_plugs_own_k_fails_by_the_gradient(job: Build) -> None:
    step = "loss = loss_of(batch) / accel.accumulate; accel.backward(loss + 0, weight=len(batch[0]))"
    of(gradients.exact(job(step=step)), Verdict.FAIL, "norm 0.5x", "divided by 2 twice")


def test_a_loss_of_the_whole_batch_is_not_exact(job: Build) -> None:
    step = "accel.training_step(lambda b: model(b[0]).std(0).mean() + loss_of(b), batch)"
    of(gradients.exact(job(step=step)), Verdict.FAIL, "against one batch of 8", "can be split")


def test_half_precision_weights_warn(job: Build) -> None:
    model_ = "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).bfloat16()"
    trials = job(model=model_, before="loader = DataLoader(TensorDataset(inputs.bfloat16(), labels), 4)")
    of(precision.placed(trials), Verdict.WARN, "4 weights are half precision")


def test_bf16_is_seen_inside_the_forward(job: Build) -> None:
    trials = job(options="precision='bf16'")
    of(precision.placed(trials), Verdict.PASS, "forward in bfloat16")
    assert "bfloat16 on cpu" in precision.scaler(trials).figure


def test_an_evaluation_that_keeps_its_outputs_is_seen_growing(job: Build) -> None:
    after = "with accel.validation(): kept.append(torch.ones(2**27))"
    of(resources.evaluation(job(before="kept = []", after=after)), Verdict.WARN, "GiB more in use", "keep counts")
    calm = job(after="with accel.validation(): model(inputs)")
    assert resources.evaluation(calm).verdict is Verdict.PASS


def test_memory_is_forecast_for_the_wanted_batch(job: Build) -> None:
    of(resources.memory(job()), Verdict.PASS, "first ", "steady ")
    trials = job(wanted=2**40)
    trials.first.records.append({"first_step_peak_gib": trials.first.fact("begun")["held_gib"] + 0.5})
    of(resources.memory(trials), Verdict.FAIL, f"{2**40} would take")


def test_disk_and_versions(job: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = job()
    assert resources.disk(trials).verdict is Verdict.PASS
    assert resources.versions(trials).verdict is Verdict.PASS
    monkeypatch.setattr(resources, "_floors", lambda: [("torch", "99.1")])
    of(resources.versions(trials), Verdict.WARN, "at least torch 99.1")
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    assert resources.disk(trials).verdict is Verdict.FAIL


def test_a_job_that_fails_on_its_way_is_judged_on_what_was_there(job: Build) -> None:
    trials = job(step="accel.training_step(loss_of, batch); assert accel.updates < 5, 'the disk is full'")
    of(runs(trials), Verdict.FAIL, "failed after 5 updates", "the disk is full")
    assert [check(trials) for check in CHECKS]


def test_a_job_that_ends_early_says_so(job: Build) -> None:
    of(runs(job(epochs=1, updates=50)), Verdict.WARN, "8 updates of 8 samples", "the job ends there")
