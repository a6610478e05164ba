"""Checkpoints of wrapped models: what is renamed, what is left, and what is refused."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from plugins.cli import main
from plugins.errors import AccelError
from plugins.repair import clean_names, repair


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


WRAPPERS = {
    "compiled": lambda m: torch.compile(m, backend="eager"),
    "parallel": nn.DataParallel,
    "both": lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    "both, the other way round": lambda m: nn.DataParallel(torch.compile(m, backend="eager")),
    "twice": lambda m: nn.DataParallel(nn.DataParallel(m)),
}


def inside(wrapper: nn.Module) -> nn.Module:
    wrapper[2] = torch.compile(nn.DataParallel(wrapper[2]), backend="eager")
    return wrapper


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), inside], ids=[*WRAPPERS, "a part of the model"])
@pytest.mark.parametrize("where", ["bare", "in a dict", "deep"])
def test_a_wrapped_models_checkpoint_loads_into_the_bare_one(tmp_path: Path, wrap, where: str) -> None:
    state = wrap(net()).state_dict()
    content = {"bare": state, "in a dict": {"model": state, "epoch": 3}, "deep": {"a": [{"b": state}], "step": 1}}[
        where
    ]
    torch.save(content, tmp_path / "w.pt")
    found = repair(tmp_path / "w.pt")
    assert found.path == tmp_path / "w.clean.pt"
    assert len(found.renamed) == len([name for name in state if "module" in name or "_orig_mod" in name])
    loaded = torch.load(found.path, weights_only=True)
    clean = {"bare": lambda: loaded, "in a dict": lambda: loaded["model"], "deep": lambda: loaded["a"][0]["b"]}[where]()
    assert isinstance(clean, OrderedDict)
    model = net()
    model.load_state_dict(clean, strict=True)
    assert set(clean._metadata) == set(net().state_dict()._metadata)
    for name, tensor in net().state_dict().items():
        assert torch.equal(clean[name], tensor)


def test_safetensors_keep_their_metadata(tmp_path: Path) -> None:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in net().state_dict().items()}
    save_file(state, tmp_path / "m.safetensors", {"format": "pt"})
    found = repair(tmp_path / "m.safetensors")
    assert found.path is not None
    net().load_state_dict(load_file(found.path), strict=True)
    with safe_open(found.path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("names", "clean"),
    [
        (["features.module.0.weight", "classifier.weight"], ["features.0.weight", "classifier.weight"]),
        (["backbone.module.w", "backbone.scale"], ["backbone.module.w", "backbone.scale"]),
        (["module.w", "head.w"], ["module.w", "head.w"]),
        (["module"], ["module"]),
        (["module.module.w"], ["w"]),
        (["model._orig_mod.module.w", "ema.w"], ["model.w", "ema.w"]),
    ],
)
def test_module_is_a_wrapper_only_where_nothing_is_beside_it(names: list[str], clean: list[str]) -> None:
    assert clean_names(names) == dict(zip(names, clean, strict=True))


def test_an_averaged_models_counter_is_left_out(tmp_path: Path) -> None:
    torch.save(torch.optim.swa_utils.AveragedModel(net()).state_dict(), tmp_path / "swa.pth")
    found = repair(tmp_path / "swa.pth")
    assert found.path == tmp_path / "swa.clean.pth"
    net().load_state_dict(torch.load(found.path, weights_only=True), strict=True)
    assert "n_averaged" in found.renamed


def test_the_optimizers_state_and_shared_tensors_stay(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weight = torch.ones(2)
    torch.save(
        {"model": {"_orig_mod.a": weight, "_orig_mod.b": weight}, "optimizer": optimizer.state_dict()},
        tmp_path / "c.pt",
    )
    loaded = torch.load(repair(tmp_path / "c.pt").path, weights_only=True)
    torch.optim.Adam(net().parameters()).load_state_dict(loaded["optimizer"])
    assert loaded["model"]["a"].data_ptr() == loaded["model"]["b"].data_ptr()


def test_a_clean_file_is_left_alone(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.pt")
    assert repair(tmp_path / "w.pt").path is None
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]


class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary",)


def test_code_in_a_file_does_not_run_unless_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"_orig_mod.a": torch.ones(1), "x": Canary()}, "bad.pt")
    with pytest.raises(AccelError, match=r"bad\.pt: holds pickled objects.*--trust"):
        repair(Path("bad.pt"))
    assert not Path("canary").exists()
    assert not Path("bad.clean.pt").exists()


def test_a_trusted_pickled_model_is_unwrapped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    torch.save({"model": nn.DataParallel(model)}, tmp_path / "whole.pt")
    found = repair(tmp_path / "whole.pt", trust=True)
    loaded = torch.load(found.path, weights_only=False)["model"]
    assert list(loaded.state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.pt", None, "no such file"),
        ("notes.txt", b"x", "expected a checkpoint file"),
        ("junk.pt", b"junk", "not a checkpoint, or a damaged one"),
        ("empty.pth", b"", "not a checkpoint, or a damaged one"),
        ("junk.safetensors", b"junk", "not a checkpoint, or a damaged one"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AccelError, match=words) as caught:
        repair(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    torch.save({"_orig_mod.a": torch.ones(1), "a": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(AccelError, match="would both be called 'a'"):
        repair(tmp_path / "w.pt")


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    torch.save({"_orig_mod.a": torch.ones(1)}, tmp_path / "w.pt")
    repair(tmp_path / "w.pt")
    with pytest.raises(AccelError, match="exists already"):
        repair(tmp_path / "w.pt")
    with pytest.raises(AccelError, match="exists already"):
        repair(tmp_path / "w.pt", output=tmp_path / "w.pt", force=True)
    assert repair(tmp_path / "w.pt", force=True).path is not None


def test_the_command_lists_what_it_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": {"_orig_mod.a": torch.ones(1)}}, tmp_path / "w.pt")
    monkeypatch.setattr("sys.argv", ["accel", "repair", str(tmp_path / "w.pt")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "model/_orig_mod.a -> model/a" in capsys.readouterr().out
