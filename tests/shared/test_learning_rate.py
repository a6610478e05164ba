from __future__ import annotations

import pytest

from integrations.shared.learning_rate import rate_factor


@pytest.mark.parametrize(("rule", "factor"), [("off", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_rate_factor_of_a_fourfold_batch(rule: str, factor: float) -> None:
    assert rate_factor(rule, 4.0) == factor
