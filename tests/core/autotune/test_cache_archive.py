from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from plugins.core.autotune.cache_archive import export, load
from plugins.core.autotune.plan_cache import MARKER, CacheError, PlanCache
from plugins.core.plan import Plan
from tests.core.remembered import entry

KEY = "0" * 64
OFFERED = {Plan("bf16")}


@pytest.fixture
def memory(tmp_path: Path) -> PlanCache:
    return PlanCache(tmp_path / "cache")


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def test_export_and_import_move_plans_and_code_and_nothing_else(memory: PlanCache, tmp_path: Path) -> None:
    memory.keep(KEY, entry())
    code = memory.inductor / "fxgraph" / "ab" / "abcd"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"code")
    (memory.inductor / "x.lock").write_text("")
    (memory.plans / "my.json").write_text("{}")
    for _ in range(2):
        assert export(memory, memory.folder / "cache.tar.gz") == 2  # the first pack is not in the second
    other = PlanCache(tmp_path / "other")
    assert load(other, memory.folder / "cache.tar.gz") == 2
    assert other.find(KEY, OFFERED) is not None
    assert other.find(KEY, OFFERED) == memory.find(KEY, OFFERED)
    assert (other.folder / code.relative_to(memory.folder)).read_bytes() == b"code"
    assert files(other.folder) == [MARKER, "inductor/fxgraph/ab/abcd", f"plans/{KEY}.json"]
    assert load(other, memory.folder / "cache.tar.gz") == 2  # over what is there


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
def test_a_pack_that_leaves_the_folder_is_refused(memory: PlanCache, tmp_path: Path, name: str) -> None:
    good = tarfile.TarInfo("inductor/good")
    pack = packed(tmp_path / "bad.tar.gz", [(tarfile.TarInfo(name), b"{}"), (good, b"{}")])
    with pytest.raises(CacheError, match=r"bad\.tar\.gz") as caught:
        load(memory, pack)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.rglob("outside.json"))
    assert not list(tmp_path.rglob("good"))


@pytest.mark.parametrize(
    "name", ["README.md", "src/a.py", "plans/my.json", f"plans/x/{KEY}.json", "inductor", "inductor/../x", MARKER]
)
def test_a_pack_of_something_else_is_refused(memory: PlanCache, tmp_path: Path, name: str) -> None:
    good = tarfile.TarInfo(f"plans/{KEY}.json")
    with pytest.raises(CacheError, match="nothing was imported"):
        load(memory, packed(tmp_path / "a.tar.gz", [(good, b"{}"), (tarfile.TarInfo(name), b"x")]))
    assert not memory.folder.exists()


def test_a_pack_of_nothing_is_refused(memory: PlanCache, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="no plan"):
        load(memory, packed(tmp_path / "a.tar.gz", []))


@pytest.mark.parametrize("taken", ["inductor/b/c/file", "inductor"])
def test_a_clash_leaves_nothing_half_unpacked(memory: PlanCache, tmp_path: Path, taken: str) -> None:
    (memory.folder / taken).parent.mkdir(parents=True)
    (memory.folder / taken).write_text("mine")
    names = ("inductor/a", "inductor/b/c", f"plans/{KEY}.json")
    with pytest.raises(CacheError, match="in the way"):
        load(memory, packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo(name), b"x") for name in names]))
    assert files(memory.folder) == [taken]


@pytest.mark.parametrize("cut", [30, -40])
def test_a_pack_cut_short_leaves_nothing_half_unpacked(memory: PlanCache, tmp_path: Path, cut: int) -> None:
    pack = packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo("inductor/a"), bytes(range(256)) * 400)] * 1)
    pack.write_bytes(pack.read_bytes()[:cut])
    with pytest.raises(CacheError, match="cannot be imported"):
        load(memory, pack)
    assert not memory.folder.exists() or files(memory.folder) in ([], [MARKER])


def test_an_absolute_name_lands_inside_of_the_folder(memory: PlanCache, tmp_path: Path) -> None:
    load(memory, packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo("/inductor/outside"), b"{}")]))
    assert (memory.inductor / "outside").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_not_unpacked(memory: PlanCache, tmp_path: Path, kind: bytes) -> None:
    through = tarfile.TarInfo("inductor/door/passwd")
    pack = packed(
        tmp_path / "bad.tar.gz", [(link("inductor/door", str(tmp_path / "away"), kind), b""), (through, b"{}")]
    )
    with pytest.raises(CacheError):
        load(memory, pack)
    assert not (tmp_path / "away").exists()


def test_a_file_that_is_no_pack_is_one_line(memory: PlanCache, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_text("no")
    for path in (tmp_path / "x.tar.gz", tmp_path / "absent.tar.gz"):
        with pytest.raises(CacheError, match=path.name):
            load(memory, path)


def test_an_imported_entry_is_checked_like_any_other(memory: PlanCache, tmp_path: Path) -> None:
    pack = packed(tmp_path / "a.tar.gz", [(tarfile.TarInfo(f"plans/{KEY}.json"), json.dumps({"key": "x"}).encode())])
    load(memory, pack)
    assert memory.find(KEY, OFFERED) is None
