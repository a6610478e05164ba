from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plugins.core.autotune import plan_cache
from plugins.core.autotune.background_compile import CompileFindings
from plugins.core.autotune.plan_cache import INDUCTOR, CacheError, PlanCache, default_folder
from plugins.core.plan import Plan
from tests.core.remembered import entry

KEY = "0" * 64
PLAN = Plan("bf16")
OFFERED = {Plan(), PLAN}


@pytest.fixture
def memory(tmp_path: Path) -> PlanCache:
    made = PlanCache(tmp_path / "cache")
    made.said = []  # type: ignore[attr-defined]
    made.warn = made.said.append  # type: ignore[attr-defined]
    return made


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanCache, "for_compiler", None)


def said(memory: PlanCache) -> list[str]:
    return memory.said  # type: ignore[attr-defined,no-any-return]


def code_in(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"code")


# -- an entry -----------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found(memory: PlanCache) -> None:
    assert memory.find(KEY, OFFERED) is None
    memory.keep(KEY, entry(PLAN))
    found = memory.find(KEY, OFFERED)
    assert found is not None
    assert (found.plan, found.tried, found.step_seconds, found.compile) == (PLAN, 3, 0.5, CompileFindings(settled=True))
    assert said(memory) == []
    assert [e.found and e.found.tried for e in memory.entries()] == [3]


def findings(**changed: Any) -> dict[str, Any]:
    return {"compile": {**CompileFindings().as_dict(), **changed}}


DAMAGED: list[Any] = [
    *("", "{", "[]", '{"schema": 2}', "\x00\xff", "null", '"text"', "[" * 100_000, '{"plan":' * 100_000),
    *({"key": "another"}, {"schema": 1}, {"plan": []}, {"plan": "x"}, {"plan": {"precision": "fp8"}}),
    *({"step_seconds": bad} for bad in (0, -1, math.nan, math.inf, "1", None)),
    *({"tried": bad} for bad in (math.inf, -3, 1.5, None, "a")),
    *({"compile": []}, {"compile": None}, {"code": None}, {"code": [1]}, {"parameters": "x"}, {"device": 3}),
    *(findings(given_up_seconds=bad) for bad in (math.inf, -1.0)),
    *(findings(fusable=bad) for bad in (math.nan, -1.0)),
    *(findings(reason=5), findings(settled="yes"), findings(warm_seconds=math.inf), findings(saved_seconds=math.nan)),
]


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda damage: str(damage)[:40])
def test_a_damaged_entry_is_discarded_with_a_warning(memory: PlanCache, damage: Any) -> None:
    memory.keep(KEY, entry(PLAN))
    path = memory.plans / f"{KEY}.json"
    text = damage if isinstance(damage, str) else json.dumps({**json.loads(path.read_text()), **damage})
    path.write_text(text, encoding="latin-1")
    assert [e.found for e in memory.entries()] == [None]
    assert path.read_text(encoding="latin-1") == text  # to look is not to touch
    assert memory.find(KEY, OFFERED) is None
    assert not path.exists()
    (line,) = said(memory)
    assert "damaged" in line
    assert "discarded" in line
    assert "\n" not in line
    assert len(line) < 500
    memory.keep(KEY, entry(PLAN))
    assert memory.find(KEY, OFFERED) is not None


@pytest.mark.parametrize("plan", [Plan("fp16"), Plan("bf16", compile="whole"), Plan(memory_format="channels_last")])
def test_a_plan_that_this_run_could_not_choose_is_none(memory: PlanCache, plan: Plan) -> None:
    memory.keep(KEY, entry(plan))
    assert memory.find(KEY, OFFERED) is None
    assert plan.name in said(memory)[0]


def test_what_cannot_be_discarded_is_not_said_to_be(memory: PlanCache) -> None:
    (memory.plans / f"{KEY}.json").mkdir(parents=True)
    assert memory.find(KEY, OFFERED) is None
    assert "(Is a directory); left aside" in said(memory)[0]


def test_the_users_own_files_are_no_entries(memory: PlanCache) -> None:
    memory.keep(KEY, entry(PLAN))
    (memory.plans / "my.json").write_text("{")
    assert [e.path.stem for e in memory.entries()] == [KEY]
    assert memory.prune(0) == (1, 0)
    assert (memory.plans / "my.json").exists()


# -- a folder that cannot be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_one_line(
    memory: PlanCache, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(plan_cache, "write_atomically", fail)
    for _ in range(2):
        memory.keep(KEY, entry(PLAN))
    assert memory.find(KEY, OFFERED) is None
    (line,) = said(memory)
    assert os.strerror(error) in line
    assert "not remembered" in line
    assert "\n" not in line


def test_a_file_in_the_folders_place_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("")
    lines: list[str] = []
    memory = PlanCache(tmp_path / "cache", lines.append)
    monkeypatch.delenv(INDUCTOR, raising=False)
    memory.use_for_compiler()
    assert INDUCTOR not in os.environ
    assert not memory.writable()
    assert memory.find(KEY, OFFERED) is None
    memory.keep(KEY, entry(PLAN))
    assert len(lines) == 1
    assert list(memory.entries()) == []


def test_the_compilers_cache_lies_there_unless_the_user_chose(
    memory: PlanCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INDUCTOR, "/chosen")
    memory.use_for_compiler()
    assert os.environ[INDUCTOR] == "/chosen"
    for own in (None, plan_cache.default_cache_dir()):  # torch sets its default by itself
        monkeypatch.delenv(INDUCTOR) if own is None else monkeypatch.setenv(INDUCTOR, own)
        memory.use_for_compiler()
        assert os.environ[INDUCTOR] == str(memory.folder / "inductor")


def test_another_run_of_a_process_has_its_own_folder(
    memory: PlanCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    memory.use_for_compiler()
    PlanCache(tmp_path / "second").use_for_compiler()
    assert os.environ[INDUCTOR] == str(tmp_path / "second" / "inductor")
    (tmp_path / "file").write_text("")
    PlanCache(tmp_path / "file").use_for_compiler()  # which cannot be one: neither is the one before it
    assert INDUCTOR not in os.environ


def test_a_plan_has_its_code_while_all_of_it_is_there(memory: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    assert memory.code() == []
    assert not memory.has_code([])
    code_in(memory.inductor, "fxgraph/ab/key/graph", "cd/kernel.so", "cd/kernel.cpp", "locks/x.lock")
    needed = memory.code()
    assert needed == ["cd/kernel.so", "fxgraph/ab/key/graph"]
    code_in(memory.inductor, "fxgraph/ef/other/graph")
    assert memory.has_code(needed)
    (memory.inductor / "cd/kernel.cpp").unlink()
    assert memory.has_code(needed)
    (memory.inductor / "cd/kernel.so").unlink()
    assert not memory.has_code(needed)


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


def test_two_processes_share_a_folder(memory: PlanCache) -> None:
    """Both write the same entries again and again; a reader never sees half of one."""
    code = (
        "import sys; from pathlib import Path; from plugins.core.autotune.plan_cache import PlanCache\n"
        "from plugins.core.plan import Plan; from tests.core.remembered import entry\n"
        "m = PlanCache(Path(sys.argv[1]), warn=lambda t: sys.exit(t))\n"
        "for i in range(40):\n"
        "    m.keep(str(i % 3) * 64, entry(Plan(), device=sys.argv[2], code=[sys.argv[2] * 20000]))\n"
        "    assert m.find(str(i % 3) * 64, {Plan()}).code[0][0] in 'ab'\n"
    )
    here = Path(plan_cache.__file__).parents[3]
    line = [sys.executable, "-c", code, str(memory.folder)]
    both = [
        subprocess.Popen([*line, name], cwd=here, stderr=subprocess.PIPE, text=True, env={**os.environ, "A": name})
        for name in "ab"
    ]
    while any(process.poll() is None for process in both):
        for one in memory.entries():
            assert one.found is not None
            assert set(one.found.code[0]) == {one.found.device}
        time.sleep(0.01)
    assert [(process.returncode, process.stderr.read()) for process in both if process.stderr] == [(0, ""), (0, "")]
    assert said(memory) == []
    assert len(list(memory.entries())) == 3
    assert [p.name for p in memory.plans.iterdir() if p.suffix != ".json"] == []


# -- prune ----------------------------------------------------------------------------------------


def aged(path: Path) -> Path:
    os.utime(path, (time.time() - 40 * 86400,) * 2)
    return path


def test_prune_removes_what_is_old_and_not_needed(memory: PlanCache) -> None:
    for index in range(3):
        memory.keep(str(index) * 64, entry(PLAN, code=["ab/needed.so"] if index else []))
    old = aged(memory.plans / f"{'0' * 64}.json")
    code_in(memory.inductor, "ab/old.so", "ab/needed.so", "ab/young.so")
    for name in ("ab/old.so", "ab/needed.so"):
        aged(memory.inductor / name)
    assert memory.prune(30) == (1, 1)
    assert not old.exists()
    assert not (memory.inductor / "ab/old.so").exists()
    assert memory.prune(0) == (2, 2)


def test_prune_leaves_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    code_in(tmp_path, "inductor/notes.txt", "plans/my.json", f"plans/{KEY}.json")
    memory = PlanCache(tmp_path)
    with pytest.raises(CacheError, match="no cache of accel"):
        memory.prune(0)
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) == 3
    memory.keep("1" * 64, entry(PLAN))  # a run was told to use it: now a plan says whose it is
    assert memory.prune(0) == (2, 1)
    assert (tmp_path / "plans/my.json").exists()


def test_a_folder_made_for_this_is_marked(memory: PlanCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    memory.use_for_compiler()
    code_in(memory.inductor, "ab/some.so")
    assert memory.prune(0) == (0, 1)


def test_a_user_without_a_home_folder_has_a_cache_of_his_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's nameless user: no HOME, and no entry in the table of users."""
    pwd = pytest.importorskip("pwd")

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = default_folder()
    assert folder == default_folder()
    assert folder.parent.parent == tmp_path / f"cache-of-user-{os.getuid()}"
    assert folder.parent.parent.stat().st_mode & 0o777 == 0o700
    assert PlanCache(folder).writable()
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # the folder of that name belongs to somebody else
    (tmp_path / "cache-of-user-54321").mkdir()
    assert default_folder().parent.parent != tmp_path / "cache-of-user-54321"
