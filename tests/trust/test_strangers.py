"""Files from strangers: none of them runs code (a canary would sing), and none takes far more memory than its size."""

from __future__ import annotations

import copy
import gzip
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import read_settings
from integrations.easyocr.weights import take_over
from integrations.huggingface.checkpoint_folders import problems
from integrations.refusal import UnsupportedRun
from plugins import AccelConfig, AccelError
from plugins.core.autotune import cache_archive, plan_file
from plugins.core.autotune.cache_archive import load
from plugins.core.autotune.plan_cache import CacheError, PlanCache
from plugins.core.checkpoint import DamagedState, NotPlain, load_sidecar, read_plain, sidecar_path
from plugins.core.checkpoint.sidecar import digest
from plugins.loop import Accelerated
from plugins.repair import repair
from tests.trust.strategies import sizes

MOST = 256 * 2**20  # bytes that reading a small file may take
CANARY = "canary"


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own; at the end no canary has sung, and memory is as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_CACHE_DIR", str(tmp_path / "cache"))
    before = psutil.Process().memory_info().rss
    yield
    assert not list(tmp_path.rglob(CANARY))
    assert psutil.Process().memory_info().rss - before < MOST


class Sings:
    """Unpickled, it writes a file."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path(CANARY).resolve(),)


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def accelerated() -> Accelerated:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    accel = Accelerated(
        model, optimizer, micro_batch=2, accumulate=2, ema=0.9, plan="off", compile="off", say=lambda line: None
    )
    for _ in range(3):
        accel.training_step(lambda x: model(x).square().mean(), torch.randn(2, 3))
    return accel


def test_the_canary_sings_where_it_is_let() -> None:
    pickle.loads(pickle.dumps(Sings()))
    assert Path(CANARY).is_file()
    Path(CANARY).unlink()


@pytest.mark.parametrize("form", ["zip", "old", "raw", "inside"])
def test_pickles_run_no_code_wherever_they_lie(form: str, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    whole = read_plain(accelerated().save(tmp_path / "good.pt")) if form == "inside" else {}
    value: Any = {**whole, "extra": {"x": Sings()}} if form == "inside" else {"model": Sings()}
    if form == "raw":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form != "old")
    with pytest.raises(AccelError, match=r"last\.pt"):
        accelerated().resume(path)
    with pytest.raises(EasyOCRError, match=r"last\.pt"):
        take_over(nn.Linear(1, 1), path, "a", given="a")
    with pytest.raises(AccelError, match=r"last\.pt"):
        repair(path)
    sidecar = sidecar_path(path, digest(path))
    sidecar.write_bytes(path.read_bytes())
    with pytest.raises(DamagedState):
        load_sidecar(path)


@pytest.mark.parametrize(
    "how", ["!!python/object/apply:pathlib.Path.touch", "!!python/name:os.system", "!!python/object:os.x"]
)
def test_yaml_runs_no_code(how: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(f"ema: {how} [{CANARY}]\n")
    with pytest.raises(AccelError, match="not readable as YAML"):
        AccelConfig(path)
    with pytest.raises(EasyOCRError, match="not readable as YAML"):
        read_settings(path)


def bomb(first: str, line: str) -> str:
    """Nine lines, each of nine aliases of the one before."""
    lines = [line.format(new=new, many=",".join([f"*{old}"] * 9)) for old, new in pairwise("abcdefghi")]
    return "".join([first, *lines])


@pytest.mark.parametrize(
    "text",
    [
        bomb("a: &a [x,x,x,x,x,x,x,x,x]\n", "{new}: &{new} [{many}]\n") + "buckets: *i\n",
        bomb("a: &a {k: 1}\n", "{new}: &{new} {{<<: [{many}]}}\n"),
        "buckets: &a [*a]\n",
        "{" * 3000,
        "x: '" + "a" * 2**23 + "'\n",
    ],
    ids=["lists", "merges", "itself", "deep", "long"],
)  # fmt: skip
def test_yaml_that_stands_for_more_than_memory_holds(text: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    with pytest.raises(AccelError, match="not readable as YAML"):
        AccelConfig(path)
    with pytest.raises(EasyOCRError, match="not readable as YAML"):
        read_settings(path)


def test_a_checkpoint_that_unpacks_to_far_more_than_its_size(tmp_path: Path) -> None:
    source = zipfile.ZipFile(accelerated().save(tmp_path / "good.pt"))
    bomb = tmp_path / "last.pt"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as file:
        for name in source.namelist():
            file.writestr(name, bytes(2**28) if name.endswith("data/0") else source.read(name))
    assert bomb.stat().st_size < 2**20
    with pytest.raises(AccelError, match="bytes unpack to"):
        accelerated().resume(bomb)


def test_one_number_that_poses_as_many(tmp_path: Path) -> None:
    path = saved(tmp_path / "w.pth", {"Prediction.weight": torch.zeros(1).expand(10**12)})
    with pytest.raises(NotPlain, match="pose as a tensor"):
        read_plain(path)
    with pytest.raises(EasyOCRError, match="fewer values than its shape"):
        take_over(nn.Linear(1, 1), path, "a", given="a")


def packed(path: Path, blocks: Iterator[bytes]) -> Path:
    with gzip.open(path, "wb") as file:
        for block in blocks:
            file.write(block)
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf()


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_cache_pack_that_unpacks_to_far_more_than_its_size(kind: bytes, tmp_path: Path) -> None:
    megabytes = 256
    zeros = (bytes(2**20) for _ in range(megabytes))
    bomb = packed(tmp_path / "bomb.tar.gz", iter([header("inductor/x", megabytes * 2**20, kind), *zeros]))
    with pytest.raises(CacheError, match="nothing was imported"):
        load(PlanCache(tmp_path / "cache"), bomb)
    assert not (tmp_path / "cache" / "inductor").exists()


def test_a_cache_pack_of_very_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_archive, "MEMBERS", 50)
    bomb = packed(tmp_path / "bomb.tar.gz", (header("inductor/x", 0) for _ in range(60)))
    with pytest.raises(CacheError, match="holds over 50 files; nothing was imported"):
        load(PlanCache(tmp_path / "cache"), bomb)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"schema": 1, "start": {}, "switches": ' + "[" * 10**5, "9" * 10**6, "1e999999"]
)
def test_deep_and_endless_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(AccelError):
        plan_file.read_switches(path)
    cache = PlanCache(tmp_path / "cache")
    cache.plans.mkdir(parents=True)
    (cache.plans / ("0" * 64 + ".json")).write_text(text)
    assert [entry.found for entry in cache.entries()] == [None]
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(text)
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    assert "model.safetensors is cut off" in problems(folder)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from leaves(part, (*path, index))


def exchanged(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another at `path`; without it where `new` is `...`."""
    if not path:
        return new
    made = copy.copy(value) if isinstance(value, dict) else list(value)
    if new is ... and len(path) == 1:
        del made[path[0]]
    else:
        made[path[0]] = exchanged(made[path[0]], path[1:], new)
    return made


ODD = [None, ..., -1, 10**30, "text", [], {}, {"a": 1}, [1, 2], float("nan"), True, torch.zeros(2, 2), torch.zeros(0)]


@sizes(60, 1000)
def test_a_checkpoint_with_any_part_exchanged_resumes_or_is_refused_in_one_line(count: int, tmp_path: Path) -> None:
    draw, whole = random.Random(count), read_plain(accelerated().save(tmp_path / "good.pt", position=3))
    places = list(leaves(whole))
    refused = 0
    for _ in range(count):
        where = draw.choice(places[1:])
        if where[0] == "random" and draw.random() < 0.9:
            continue  # most of the file
        path, accel = saved(tmp_path / "last.pt", exchanged(whole, where, draw.choice(ODD))), accelerated()
        try:
            accel.resume(path)
        except AccelError as error:
            assert "\n" not in str(error)
            refused += 1
        finally:
            accel.end()
    assert refused


def test_a_trainer_s_extra_state_that_is_none(tmp_path: Path) -> None:
    from tests.huggingface.runs import trainer_for

    options = {"plan": "off", "compile": "off"}
    run = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
    trainer, _ = trainer_for("bert-token", tmp_path / "run", 8, options=options, **run)
    trainer.train()
    for value in (Sings(), {}, {"raw": 1}):
        saved(tmp_path / "run" / "checkpoint-1" / "accel_state.pt", value)
        again, _ = trainer_for("bert-token", tmp_path / "run", 8, options=options, **run)
        with pytest.raises((AccelError, UnsupportedRun), match=r"accel_state\.pt: damaged") as caught:
            again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
        assert "\n" not in str(caught.value)
