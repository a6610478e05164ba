from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from plugins.core import remember
from plugins.core.remember import INDUCTOR, CacheError, Memory, default_folder, fingerprint
from tests.core.tiny import CPU, Mlp, Net, mlp

KEY = "0" * 64
ENTRY = {"plan": {"precision": "bf16"}, "tried": 3}


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    made = Memory(tmp_path / "cache")
    made.said = []  # type: ignore[attr-defined]
    made.warn = made.said.append  # type: ignore[attr-defined]
    return made


def said(memory: Memory) -> list[str]:
    return memory.said  # type: ignore[attr-defined,no-any-return]


# -- an entry -----------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found(memory: Memory) -> None:
    assert memory.find(KEY) is None
    memory.keep(KEY, ENTRY)
    found = memory.find(KEY)
    assert found is not None
    assert ENTRY.items() <= found.items()
    assert said(memory) == []
    assert [entry.data["tried"] for entry in memory.entries()] == [3]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "key": "another"}', "\x00\x01", "null", '"text"']
)
def test_a_damaged_entry_is_discarded_with_a_warning(memory: Memory, text: str) -> None:
    memory.keep(KEY, ENTRY)
    path = memory.plans / f"{KEY}.json"
    path.write_text(text)
    assert memory.find(KEY) is None
    assert not path.exists()
    assert len(said(memory)) == 1
    assert "damaged" in said(memory)[0]
    memory.keep(KEY, ENTRY)
    assert memory.find(KEY) is not None


def test_bytes_that_are_no_text_are_damage(memory: Memory) -> None:
    memory.keep(KEY, ENTRY)
    (memory.plans / f"{KEY}.json").write_bytes(b"\xff\xfe\x80")
    assert memory.find(KEY) is None
    assert "damaged" in said(memory)[0]


def test_the_schema_of_another_release_is_ignored(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.keep(KEY, ENTRY)
    monkeypatch.setattr(remember, "SCHEMA", remember.SCHEMA + 1)
    assert memory.find(KEY) is None


# -- a folder that cannot be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_one_line(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(remember, "write_atomically", fail)
    memory.keep(KEY, ENTRY)
    assert memory.find(KEY) is None
    (line,) = said(memory)
    assert os.strerror(error) in line
    assert "not remembered" in line
    assert "\n" not in line


def test_a_file_in_the_folders_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    lines: list[str] = []
    memory = Memory(tmp_path / "cache", lines.append)
    monkeypatch.delenv(INDUCTOR, raising=False)
    memory.use_for_compiler()
    assert INDUCTOR not in os.environ
    assert memory.find(KEY) is None
    memory.keep(KEY, ENTRY)
    assert len(lines) == 1
    assert list(memory.entries()) == []


def test_the_compilers_cache_lies_there_unless_the_user_chose(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/chosen")
    memory.use_for_compiler()
    assert os.environ[INDUCTOR] == "/chosen"
    for own in (None, remember.default_cache_dir()):  # torch sets its default by itself
        monkeypatch.delenv(INDUCTOR) if own is None else monkeypatch.setenv(INDUCTOR, own)
        memory.use_for_compiler()
        assert os.environ[INDUCTOR] == str(memory.folder / "inductor")
    assert not memory.has_code()
    code = memory.folder / "inductor" / "fxgraph" / "ab" / "abcd"
    code.mkdir(parents=True)
    assert memory.has_code()


def test_one_folder_a_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folders = set()
    for name in ("a/work", "b/work"):
        (tmp_path / name).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        folders.add(default_folder())
    assert len(folders) == 2
    assert {f.parent for f in folders} == {tmp_path / "home" / "accel-plugins"}
    assert all(f.name.startswith("work-") for f in folders)


# -- two processes ------------------------------------------------------------------------------------------------


def test_two_processes_share_a_folder(memory: Memory) -> None:
    """Both write the same entries again and again; a reader never sees half of one."""
    code = (
        "import sys; from pathlib import Path; from plugins.core.remember import Memory\n"
        "m = Memory(Path(sys.argv[1]), warn=lambda t: sys.exit(t))\n"
        "for i in range(40):\n"
        "    m.keep(str(i % 3), {'plan': {}, 'by': sys.argv[2], 'pad': sys.argv[2] * 20000})\n"
        "    assert m.find(str(i % 3))['pad'][0] in 'ab'\n"
    )
    here = Path(remember.__file__).parents[2]
    line = [sys.executable, "-c", code, str(memory.folder)]
    both = [
        subprocess.Popen([*line, name], cwd=here, stderr=subprocess.PIPE, text=True, env={**os.environ, "A": name})
        for name in "ab"
    ]
    while any(process.poll() is None for process in both):
        for entry in memory.entries():
            assert set(entry.data["pad"]) == {entry.data["by"]}
        time.sleep(0.01)
    assert [(process.returncode, process.stderr.read()) for process in both if process.stderr] == [(0, ""), (0, "")]
    assert said(memory) == []
    assert len(list(memory.entries())) == 3
    assert [p.name for p in memory.plans.iterdir() if p.suffix != ".json"] == []


# -- the fingerprint ----------------------------------------------------------------------------------------------


def test_other_work_has_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(model: Any, shape: tuple[int, ...] = (4, 3), settings: Any = ("auto",)) -> str:
        return fingerprint(model, shape, CPU, settings)

    one = of(mlp())
    assert of(mlp(seed=1)) == one  # weights do not matter
    frozen = mlp()
    frozen.first.weight.requires_grad_(False)
    others = [of(Mlp(norm=True)), of(Net()), of(mlp(dtype=torch.float64)), of(frozen), of(mlp(), (8, 3))]
    others.append(of(mlp(), settings=("off",)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    others.append(of(mlp()))
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    others.append(of(mlp()))
    assert len({one, *others}) == 1 + len(others)


# -- prune, export, import ----------------------------------------------------------------------------------------


def test_prune_removes_what_is_old(memory: Memory) -> None:
    for index in range(3):
        memory.keep(str(index), ENTRY)
    old = memory.plans / "0.json"
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    code = memory.folder / "inductor" / "ab" / "abcd.so"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"code")
    os.utime(code, (time.time() - 40 * 86400,) * 2)
    assert memory.prune(30) == (1, 1)
    assert not old.exists()
    assert not code.exists()
    assert memory.prune(0) == (2, 0)


def test_export_and_import_move_plans_and_code(memory: Memory, tmp_path: Path) -> None:
    memory.keep(KEY, ENTRY)
    code = memory.folder / "inductor" / "fxgraph" / "ab" / "abcd"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"code")
    (memory.folder / "inductor" / "x.lock").write_text("")
    assert memory.export(tmp_path / "cache.tar.gz") == 2
    other = Memory(tmp_path / "other")
    assert other.load(tmp_path / "cache.tar.gz") == 2
    assert other.find(KEY) == memory.find(KEY)
    assert (other.folder / code.relative_to(memory.folder)).read_bytes() == b"code"


def packed(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as pack:
        for info, data in members:
            info.size = len(data)
            pack.addfile(info, io.BytesIO(data))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("name", ["../outside.json", "plans/../../outside.json", "plans/../../cache2/outside.json"])
def test_a_pack_that_leaves_the_folder_is_refused(memory: Memory, tmp_path: Path, name: str) -> None:
    good = tarfile.TarInfo("plans/good.json")
    pack = packed(tmp_path / "bad.tar.gz", [(tarfile.TarInfo(name), b"{}"), (good, b"{}")])
    with pytest.raises(CacheError, match=r"bad\.tar\.gz") as caught:
        memory.load(pack)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("outside.json"))
    assert not list(tmp_path.rglob("good.json"))


def test_an_absolute_name_lands_inside_of_the_folder(memory: Memory, tmp_path: Path) -> None:
    memory.load(packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo("/plans/outside.json"), b"{}")]))
    assert (memory.plans / "outside.json").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_not_unpacked(memory: Memory, tmp_path: Path, kind: bytes) -> None:
    through = tarfile.TarInfo("plans/door/passwd.json")
    pack = packed(tmp_path / "bad.tar.gz", [(link("plans/door", str(tmp_path / "away"), kind), b""), (through, b"{}")])
    with pytest.raises(CacheError):
        memory.load(pack)
    assert not (tmp_path / "away").exists()


def test_a_file_that_is_no_pack_is_one_line(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_text("no")
    for path in (tmp_path / "x.tar.gz", tmp_path / "absent.tar.gz"):
        with pytest.raises(CacheError, match=path.name):
            memory.load(path)


def test_an_imported_entry_is_checked_like_any_other(memory: Memory, tmp_path: Path) -> None:
    pack = packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo(f"plans/{KEY}.json"), json.dumps({"key": "x"}).encode())])
    memory.load(pack)
    assert memory.find(KEY) is None
    assert "damaged" in said(memory)[0]
