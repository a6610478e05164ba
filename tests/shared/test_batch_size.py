from __future__ import annotations

from typing import Any

import pytest

from integrations.refusal import UnsupportedRun
from integrations.shared.batch_size import micro_batches_per_update
from plugins.config import AccelConfig

STEP = "the 4 samples of one step"


@pytest.mark.parametrize(
    ("options", "host", "found"),
    [({}, None, None), ({}, 3, 3), ({"accumulate": 6}, 3, 6), ({"effective_batch": 24}, 3, 6)],
)
def test_micro_batches_come_from_the_settings_and_else_from_the_host(
    options: dict[str, Any], host: int | None, found: int | None
) -> None:
    assert micro_batches_per_update(AccelConfig(**options), 4, host=host, named=STEP) == found


@pytest.mark.parametrize(("wanted", "near"), [(10, "8 or 12"), (3, "4")])
def test_an_effective_batch_that_is_no_multiple_is_refused_with_the_next_ones(wanted: int, near: str) -> None:
    line = rf"^effective_batch={wanted}: not a multiple of the 4 samples of one step; allowed near it: {near}$"
    with pytest.raises(UnsupportedRun, match=line):
        micro_batches_per_update(AccelConfig(effective_batch=wanted), 4, host=1, named=STEP)


@pytest.mark.parametrize(("wanted", "found"), [(10, 3), (8, 2), (3, 1)])
def test_an_effective_batch_over_a_step_that_nobody_chose_is_rounded_up(wanted: int, found: int) -> None:
    config = AccelConfig(effective_batch=wanted)
    assert micro_batches_per_update(config, 4, host=1, named=STEP, rounded=True) == found
