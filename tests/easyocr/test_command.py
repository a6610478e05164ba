"""`accel fit`: the loop as one command."""

from __future__ import annotations

import sys

import easyocr  # noqa: F401  (the printed line names it)
import pytest
import yaml

from plugins import cli
from tests.easyocr.runs import interrupt_at_show


@pytest.fixture
def accel(monkeypatch, capsys, tmp_path, tiny):
    """`accel("lr=1")` is `accel fit config.yaml lr=1`: exit code, stdout, stderr."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tiny), encoding="utf-8")

    def run(*arguments, config=config):
        monkeypatch.setattr(sys, "argv", ["accel", "fit", str(config), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_a_command_leaves_what_the_printed_reader_loads(accel):
    code, out, _ = accel("num_iter=4", "accumulate=2", "lang_list=en", "optim=False", "contrast_adjust=False")
    assert code == 0
    assert "stopped at update 4: num_iter" in out
    (line,) = (line for line in out.splitlines() if line.startswith("easyocr.Reader("))
    reader = eval(line[:-1] + ", gpu=False, quantize=False, detector=False, verbose=False)")
    assert reader.recognizer is not None


def test_interrupted_it_says_how_to_go_on_and_does(accel, monkeypatch):
    with monkeypatch.context() as patched:
        interrupt_at_show(patched)
        code, out, error = accel("num_iter=12")
    assert code == 130
    assert "interrupted" in out
    assert "--resume" in error
    code, out, _ = accel("num_iter=12", "--resume")
    assert code == 0
    assert "stopped at update 12" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["lr"], "lr: expected KEY=VALUE"),
        (["say=x"], "say=x: expected KEY=VALUE"),
        (["config=x"], "config=x: expected KEY=VALUE"),
        (["num_iter=many"], "num_iter='many'"),
        (["num_itr=4"], "did you mean num_iter"),
        (["accumulate=none"], "accumulate=none"),
        (["train_data=nowhere"], "nowhere"),
        (["--resume"], "last.pt"),
    ],
)
def test_a_mistake_is_one_line(accel, tmp_path, options, named):
    before = sorted(tmp_path.rglob("*"))
    code, _, error = accel(*options)
    assert code == 1
    assert error.startswith("accel: ")
    assert error.count("\n") == 1
    assert named in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_yaml_that_is_not_there(accel, tmp_path):
    code, _, error = accel(config=tmp_path / "no.yaml")
    assert (code, error.count("\n")) == (1, 1)
    assert "no.yaml: no such file" in error
