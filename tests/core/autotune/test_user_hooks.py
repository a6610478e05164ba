from __future__ import annotations

import pytest
from torch import nn

from plugins.core.autotune.user_hooks import hooked
from plugins.core.plan import Plan
from tests.core.planned import BOTH_WIN, UPDATES, Clock, Host, by_name


@pytest.mark.parametrize(
    ("at", "hook"),
    [
        ("head.weight", "register_hook"),
        ("head.weight", "register_post_accumulate_grad_hook"),
        ("head", "register_forward_hook"),
    ],
)
def test_what_a_user_hung_on_a_model_runs_in_the_run_s_own_steps_only(clock: Clock, at: str, hook: str) -> None:
    """It may step an optimizer, as a layer-wise one does, log gradients, as `wandb.watch` does, or keep features."""
    host, calls = Host(clock, by_name(**BOTH_WIN)), list[int]()
    hung = host.model.get_parameter(at) if "." in at else host.model.get_submodule(at)
    getattr(hung, hook)(lambda *_: calls.append(1))
    tuner = host.run(UPDATES).tuner
    assert len(calls) == host.losses == UPDATES
    assert (tuner.plan, tuner.measured) == (Plan(), True)
    assert f"{at} has a hook of the user's own" in tuner.outcome.reason


def test_hooks_of_torch_itself_are_no_user_s() -> None:
    assert hooked(nn.utils.spectral_norm(nn.Linear(2, 2))) == ""  # it has a pre-hook
