"""Compile in the host's loop: the budget, the shapes, the fall to eager, and what the report says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests import reference
from tests.ultralytics.conftest import Train

EAGER = {"compile": "on", "compile_backend": "eager"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, data: Callable[..., Path]) -> Path:
    """The data set with images of four aspect ratios: rectangular batches of several shapes."""
    import shutil

    folder = tmp_path_factory.mktemp("wide")
    shutil.copytree(data(16).parent, folder, dirs_exist_ok=True)
    for split in ("train", "val"):
        for n, path in enumerate(sorted((folder / "images" / split).glob("*.png"))):
            width, height = ((128, 64), (64, 128), (128, 128), (128, 40))[n % 4]
            Image.open(path).resize((width, height)).save(path)
    for cache in folder.rglob("*.cache"):
        cache.unlink()
    yaml = folder / "data.yaml"
    yaml.write_text("\n".join([f"path: {folder}", *yaml.read_text().splitlines()[1:]]) + "\n")
    return yaml


def test_the_whole_forward_is_compiled_and_changes_nothing(train: Train) -> None:
    run = train(accel={**EAGER, "accumulate": 2, "batchnorm": "freeze"}, epochs=2)
    facts = run.report["compile"]
    assert (facts["decision"], facts["reason"], facts["graphs"], facts["graph_breaks"]) == ("whole", "compile=on", 1, 0)
    assert facts["phases"]["train"] >= 1
    assert facts["budget"] == 8
    assert facts["seconds"] > 0
    plain = train(accel={"accumulate": 2, "batchnorm": "freeze"}, epochs=2, name="plain")
    assert reference.difference(run.weights, plain.weights) <= 1e-6


def test_multi_scale_and_rectangular_validation_stay_within_the_budget(
    train: Train, wide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 21996: every size of multi-scale, a ragged last batch, validation of several shapes every epoch."""
    run = train(
        accel=EAGER,
        data=str(wide),
        multi_scale=0.5,
        epochs=5,
        batch=6,
        val=True,
    )
    facts = run.report["compile"]
    assert len(run.report["shapes"]["seen"]) >= 3
    assert facts["decision"] == "whole"
    assert facts["graphs"] <= 3 < facts["budget"]
    assert "validation" not in facts["phases"]
    assert "recompile_limit" not in caplog.text
    assert not any("compile" in w for w in run.report["warnings"])


def test_rectangular_training(train: Train, wide: Path) -> None:
    run = train(accel=EAGER, data=str(wide), rect=True, epochs=3, imgsz=128, val=True)
    facts = run.report["compile"]
    assert len(run.report["shapes"]["seen"]) >= 3
    assert facts["graphs"] <= facts["budget"]
    assert facts["decision"] == "whole"


def test_past_the_budget_the_run_goes_on_eagerly_with_one_warning(train: Train) -> None:
    run = train(accel={**EAGER, "recompile_budget": 1, "dynamic": "static", "accumulate": 1}, images=10, epochs=3)
    facts = run.report["compile"]
    assert facts["decision"] == "eager"
    assert "recompile_budget=1" in facts["reason"]
    assert sum("recompile_budget=1" in w for w in run.report["warnings"]) == 1
    assert run.report["window"]["updates"] > 3


def test_a_compiler_that_raises_is_one_warning_and_an_eager_run(train: Train) -> None:
    from torch._dynamo import register_backend
    from torch._dynamo.backends.registry import list_backends

    def raises(*_: Any) -> Any:
        raise RuntimeError("cannot lower this")

    if "raises" not in list_backends():
        register_backend(raises, name="raises")  # type: ignore[call-overload]
    run = train(accel={"compile": "on", "compile_backend": "raises", "accumulate": 2}, epochs=2, val=True)
    plain = train(accel={"accumulate": 2}, epochs=2, val=True, name="plain")
    assert run.report["compile"]["decision"] == "eager"
    assert "cannot lower this" in run.report["compile"]["reason"]
    assert sum("cannot lower this" in w for w in run.report["warnings"]) == 1
    assert all(torch.equal(t, plain.weights[n]) for n, t in run.weights.items())


def test_without_a_compiler_one_line_and_an_eager_run(train: Train) -> None:
    import torch._inductor.config as config
    from torch._inductor import cpp_builder

    for name in ("get_cpp_compiler", "_is_gcc"):
        getattr(getattr(cpp_builder, name, None), "cache_clear", lambda: None)()
    with config.patch({"cpp.cxx": ("/nonexistent",)}):  # put back whole: other tests compile in this process
        run = train(accel={"compile": "on"})
    assert run.report["compile"]["decision"] == "eager"
    assert sum("no C++ compiler found" in w for w in run.report["warnings"]) == 1
    assert run.report["compile"]["graphs"] == 0


@pytest.mark.parametrize(
    ("scope", "decision", "graphs"),
    [("model.2", "features", 1), ("regional", "regional", 1), (["model.0", "model.1"], "features", 2)],
)
def test_scopes(scope: Any, decision: str, graphs: int, train: Train) -> None:
    run = train(accel={**EAGER, "compile_scope": scope})
    assert run.report["compile"]["decision"] == decision
    assert run.report["compile"]["graphs"] >= graphs
    assert all("_orig_mod" not in n for n in run.weights)


def test_a_scope_that_matches_nothing_is_one_line(train: Train) -> None:
    from plugins.errors import AccelError

    with pytest.raises(AccelError, match=r"compile_scope=no\.such: no module has such a name"):
        train(accel={**EAGER, "compile_scope": "no.such"})


def test_compiled_validation(train: Train) -> None:
    run = train(accel={**EAGER, "validate": "compiled"}, epochs=2, val=True, images=8)
    plain = train(name="plain", accel={}, epochs=2, val=True, images=8)
    facts = run.report["compile"]
    assert facts["decision"] == "whole"
    assert facts["graphs"] == 1
    assert facts["phases"]["validation"] >= 1
    assert run.trainer.fitness == pytest.approx(plain.trainer.fitness, abs=1e-4)
    assert run.trainer.ema.ema._compiled_call_impl is None


def test_auto_says_why_it_stays_eager(train: Train) -> None:
    facts = train(accel={}).report["compile"]
    assert facts["decision"] == "eager"
    assert facts["reason"]
