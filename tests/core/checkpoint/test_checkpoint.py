from __future__ import annotations

import io
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from plugins.core import checkpoint
from plugins.core.checkpoint import sidecar
from tests.core.checkpoint.conftest import NEW, OLD, fail
from tests.core.tiny import mlp, same

# -- extra state ------------------------------------------------------------------------------------------------------


def test_extra_state_belongs_to_one_checkpoint(file: Path) -> None:
    assert checkpoint.load_sidecar(file) is None
    extra = checkpoint.save_sidecar(file, OLD, {"n": 1, "weights": torch.ones(2)})
    assert extra.parent == file.parent
    assert extra.suffix == ".accel"
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["n"] == 1
    file.write_bytes(NEW)
    assert checkpoint.load_sidecar(file) is None
    extra.rename(checkpoint.sidecar_path(file, sidecar.digest(file)))  # another's, under this one's name
    assert checkpoint.load_sidecar(file) is None


def test_numbers_of_numpy_are_saved_as_python_s(file: Path) -> None:
    """Schedulers and hosts set rates by `numpy.interp`, and a file of plain values cannot be read with them."""
    group = {
        "lr": numpy.float64(0.1),
        "count": numpy.int64(3),
        "on": numpy.bool_(True),
        "betas": (numpy.float32(0.5), 1),
    }
    checkpoint.save_sidecar(file, OLD, {"optimizer": {"param_groups": [group]}})
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "count": 3, "on": True, "betas": (0.5, 1)}]


def test_a_failed_write_of_extra_state_leaves_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save_sidecar(file, OLD, {"n": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(OSError):
            checkpoint.save_sidecar(file, NEW, {"n": 2})
    found = checkpoint.load_sidecar(file)
    assert found is not None
    assert found["n"] == 1


def test_drop_removes_older_states_of_this_checkpoint_only(tmp_path: Path) -> None:
    last, other, odd = tmp_path / "last.pt", tmp_path / "last.old.pt", tmp_path / "la[s]t.pt"
    first = checkpoint.save_sidecar(last, OLD, {})
    second = checkpoint.save_sidecar(last, NEW, {})
    theirs = checkpoint.save_sidecar(other, OLD, {})
    strange = checkpoint.save_sidecar(odd, OLD, {})
    checkpoint.drop_sidecars(last, keep=second)
    assert (first.exists(), second.exists(), theirs.exists(), strange.exists()) == (False, True, True, True)
    checkpoint.drop_sidecars(last)
    checkpoint.drop_sidecars(odd)
    assert (second.exists(), theirs.exists(), strange.exists()) == (False, True, False)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_without_wrappers() -> None:
    for key in ("_orig_mod.a.weight", "module.a.weight", "module._orig_mod.a.weight", "a._orig_mod.weight"):
        assert checkpoint.clean_key(key) == "a.weight"
    assert checkpoint.clean_key("a.module.weight") == "a.module.weight"


def test_unwrap() -> None:
    model = mlp()
    assert checkpoint.unwrap(torch.compile(model, backend="eager")) is model
    assert checkpoint.unwrap(model) is model
    holder = nn.Module()
    holder.module = model
    assert checkpoint.unwrap(holder) is holder


# -- random state -----------------------------------------------------------------------------------------------------


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(3),
        torch.randperm(5),
    ]


def test_random_state_of_python_numpy_and_torch_comes_back() -> None:
    checkpoint.seed_everything(3)
    random.gauss(0, 1)  # both keep the second of a pair of normal numbers
    numpy.random.randn()
    buffer = io.BytesIO()
    torch.save(checkpoint.random_state(), buffer)
    right = draws()
    checkpoint.seed_everything(4)
    assert not same(draws(), right)
    buffer.seek(0)
    checkpoint.set_random_state(torch.load(buffer, weights_only=True))
    assert same(draws(), right)


def test_the_same_seed_is_the_same_run() -> None:
    checkpoint.seed_everything(5)
    right = draws()
    checkpoint.seed_everything(5)
    assert same(draws(), right)
    checkpoint.seed_everything(2**40)  # numpy takes 32 bits


def test_a_state_without_numpy_loads() -> None:
    state = checkpoint.random_state()
    del state["numpy"]
    checkpoint.set_random_state(state)


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_extra_state_names_its_file(tmp_path: Path, content: bytes | None) -> None:
    last = tmp_path / "last.pt"
    last.write_bytes(b"weights")
    extra = checkpoint.save_sidecar(last, b"weights", {"x": torch.zeros(1000)})
    extra.write_bytes(extra.read_bytes()[:500] if content is None else content)
    with pytest.raises(checkpoint.DamagedState, match=re.escape(str(extra))):
        checkpoint.load_sidecar(last)
