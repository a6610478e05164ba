from __future__ import annotations

from pathlib import Path

import pytest

from plugins.core.checkpoint.run_lock import FolderInUse, run_lock


def test_a_folder_is_claimed_by_one_run_at_a_time(tmp_path: Path) -> None:
    with run_lock(tmp_path), pytest.raises(FolderInUse, match="another run writes here"), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_new_folders_that_stayed_empty_are_gone_and_the_others_kept(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with run_lock(tmp_path / "runs" / "mine", "model", "old"):
        assert (tmp_path / "runs" / "mine" / "old").is_dir()
        (tmp_path / "runs" / "mine" / "model" / "x").touch()
    assert [str(p.relative_to(tmp_path)) for p in sorted(tmp_path.rglob("*"))] == [
        "old", "runs", "runs/mine", "runs/mine/model", "runs/mine/model/x",
    ]  # fmt: skip
    with pytest.raises(KeyError), run_lock(tmp_path / "a" / "b", "c"):
        raise KeyError
    assert not (tmp_path / "a").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(FolderInUse, match="taken") as error, run_lock(tmp_path / "taken" / "run", "model"):
        pass
    assert "\n" not in str(error.value)
