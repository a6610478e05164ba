"""Random settings from every source: one line that says what is wrong, or settings that a run can be made with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from plugins import AccelConfig, AccelError
from plugins.loop import Accelerated
from tests.trust.strategies import ALLOWED_SETTINGS, MISSPELT, NAMES, NESTED, SETTINGS, WORDS, sizes, tried, yaml_files

SHOWN = 1500  # characters that an error may have: it is to be read


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))


def made(config: Any = None, **options: Any) -> AccelConfig | None:
    """The settings, or None where they are refused as they should be."""
    try:
        found = AccelConfig(config, **options)
    except AccelError as error:
        assert "\n" not in str(error)
        assert 0 < len(str(error)) < SHOWN
        str(error).encode()
        return None
    json.dumps(found.dump()), json.dumps(found.given())
    assert AccelConfig(**found.given()).dump() == found.dump()
    return found


@sizes(300, 4000)
def test_random_arguments(count: int) -> None:
    tried(count, SETTINGS, lambda options: made(**{str(k): v for k, v in options.items() if k != "config"}) and None)


@sizes(150, 2000)
def test_random_files(count: int, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        made(path)

    tried(count, yaml_files(SETTINGS | NESTED), check)


@sizes(100, 1000)
def test_random_environment(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(variables: dict[str, str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setitem(os.environ, f"ACCEL_{name.upper()}", value)
            made()

    values = st.sampled_from(WORDS) | st.text(max_size=20)
    plain = values.filter(lambda text: "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text))
    names = st.sampled_from([*NAMES, "CONFIG", "X"])
    tried(count, st.dictionaries(names, plain, max_size=4), check)


@sizes(50, 500)
def test_random_paths_of_a_file(count: int) -> None:
    tried(count, st.sampled_from(WORDS) | st.text(max_size=300) | NESTED | MISSPELT, lambda path: made(path) and None)


@sizes(10, 300)
def test_settings_that_are_allowed_make_a_run_or_are_refused_in_one_line(count: int, tmp_path: Path) -> None:
    def check(options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options = {**options, "compile_backend": "eager"}
        if options.get("plan") == "a":
            del options["plan"]
        try:
            accel = Accelerated(model, optimizer, micro_batch=4, say=lambda line: None, **options)
            try:
                for batch in accel.batches([torch.randn(4, 4) for _ in range(4)]):
                    accel.training_step(lambda batch: model(batch).square().mean(), batch)
                with accel.validation() as held, torch.no_grad():
                    held(torch.randn(2, 4))
                accel.save(tmp_path / "last.pt")
            finally:
                accel.end(tmp_path)
        except AccelError as error:
            assert "\n" not in str(error)
            return
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())

    tried(count, ALLOWED_SETTINGS, check)
