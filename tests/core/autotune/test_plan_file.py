from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugins.config import AccelConfig
from plugins.core.autotune import plan_file
from plugins.core.autotune.plan_file import PLAN_NAME, PlanError, Start, Switch, read_switches, write_switches
from plugins.core.plan import Plan
from tests.core.tiny import CPU

BF16 = Plan("bf16", "channels_last")


def start(**options: Any) -> Start:
    return Start.of(AccelConfig(**options), CPU)


def test_switches_are_written_and_read(tmp_path: Path) -> None:
    switches = [Switch(4, BF16), Switch(90, Plan("bf16", "channels_last", "regional"))]
    path = write_switches(tmp_path, Plan(), switches)
    assert path.name == PLAN_NAME
    assert read_switches(path) == switches
    assert start(plan=path).switches == tuple(switches)
    assert start(plan=path).open_fields == frozenset()


def test_a_start_that_is_not_the_hosts_is_a_switch_at_update_0(tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan("fp32"), [Switch(4, BF16)])
    assert read_switches(path) == [Switch(0, Plan("fp32")), Switch(4, BF16)]
    path = write_switches(tmp_path, Plan("fp32"), [Switch(0, BF16)])
    assert read_switches(path) == [Switch(0, BF16)]


def test_a_file_without_switches_is_the_hosts_own_run(tmp_path: Path) -> None:
    assert start(plan=write_switches(tmp_path, Plan(), []), precision="auto").plan == Plan()


def test_a_file_for_another_device_is_refused(tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(2, Plan("fp16"))])
    with pytest.raises(PlanError, match=r"plan.json: from update 2 on, .*not on a CPU"):
        start(plan=path)
    assert Start(switches=tuple(read_switches(path))).in_fp16
    assert not start(precision="bf16").in_fp16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("", "not a plan file"),
        ("[]", "not a plan file"),
        ('{"start": {}}', "switches"),
        ('{"start": {}, "switches": [{"update": "x", "plan": {}}]}', "not a plan file"),
        ('{"start": {}, "switches": [{"update": 1, "plan": {"precision": "fp8"}}]}', "precision=fp8"),
        ('{"start": {"compile": "on"}, "switches": []}', "compile=on"),
        ("\x00\xff", "not a plan file"),
        ('{"start": [], "switches": []}', r"start \[\] is no plan"),
        ('{"start": {}, "switches": [{"update": 1, "plan": []}]}', "no plan"),
        ('{"start": {}, "switches": [{"update": 1, "plan": "bf16"}]}', "'bf16' is no plan"),
        ('{"start": {"precision": ["bf16"]}, "switches": []}', "precision="),
        ('{"start": {"precision": "a\\nb"}, "switches": []}', "precision=a b"),
        ('{"start": {}, "switches": {"a": 1}}', "switches"),
        ('{"start": {}, "switches": [{"update": Infinity, "plan": {}}]}', r"switches\.0\.update"),
        ('{"start": {}, "switches": [{"update": -5, "plan": {}}]}', "greater than or equal to 0"),
        ('{"start": {}, "switches": [{"update": 2.7, "plan": {}}]}', "integer"),
        ('{"schema": 99, "start": {}, "switches": []}', "schema"),
        ("[" * 100_000, "not a plan file"),
        ('{"start": ' + "[" * 100_000, "not a plan file"),
    ],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(PlanError, match=why) as caught:
        start(plan=path)
    assert str(caught.value).startswith(f"plan={path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fixed", "told"),
    [
        ({"precision": "fp32"}, "says precision=bf16 from update 2 on, which contradicts precision=fp32"),
        ({"precision": "host"}, "which contradicts precision=host"),
        ({"memory_format": "channels_last"}, "memory_format=host from update 2 on, which contradicts"),
    ],
)
def test_a_file_that_contradicts_what_is_fixed(tmp_path: Path, fixed: dict[str, str], told: str) -> None:
    path = write_switches(tmp_path, Plan(), [Switch(2, Plan("bf16"))])
    with pytest.raises(PlanError, match=told):
        start(plan=path, **fixed)
    assert start(plan=path, precision="bf16").switches == (Switch(2, Plan("bf16")),)


def test_what_the_settings_leave_open() -> None:
    assert start().open_fields == {"compile", "memory_format"}
    assert start(precision="auto").open_fields == {"compile", "memory_format", "precision"}
    assert start(precision="fp32", memory_format="host", compile="off").open_fields == frozenset()
    assert start(plan="off", precision="auto").open_fields == frozenset()
    assert start(precision="auto").plan == Plan()  # the host's own until something better was measured
    assert start(plan="off", precision="auto").plan.precision in ("bf16", "fp32")
    assert start(precision="fp32", memory_format="channels_last").plan == Plan("fp32", "channels_last")


def test_a_file_without_switches_leaves_the_hosts_precision(tmp_path: Path) -> None:
    path = write_switches(tmp_path, Plan(), [])
    assert start(plan=path, precision="auto") == Start()


def test_several_ranks_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_file.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(plan_file.dist, "get_world_size", lambda: 2)
    assert start(precision="auto").open_fields == frozenset()


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    data = json.loads(write_switches(tmp_path, Plan(), [Switch(4, BF16)]).read_text())
    assert data["schema"] == 1
    assert data["switches"] == [{"update": 4, "plan": BF16.as_dict()}]
