"""Random label files and yamls of the recognizer: data that can be trained on, or one line that says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from integrations.easyocr.data import Skipped, keep_trainable, read_any
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.prepare import prepare
from integrations.easyocr.settings import Settings, read_settings
from tests.easyocr.conftest import TINY, draw, numbers, write_folder
from tests.trust.strategies import NESTED, damaged, sizes, tried, yaml_files

ODD = ["x\0y.png", "a" * 300, "../0.png", "", ".", "C:\\0.png", "é.png", "e\u0301.png", "train", "\ud800", "/dev/zero"]
LABEL = (
    st.text(max_size=12)
    | st.text("0123456789 ,\"'", max_size=9)
    | st.sampled_from(["\u202e12", "ß", "אב 12", "\x1b[2J"])
)
NAME = st.sampled_from([*(f"{n}.png" for n in range(4)), *ODD]) | st.text(max_size=8)
ROWS = st.lists(st.tuples(NAME, LABEL), max_size=6)


def file_of(rows: list[tuple[str, str]], header: str, end: str, mark: str) -> bytes:
    lines = [header, *(f"{name}{mark}{label}" for name, label in rows)]
    return end.join(lines).encode("utf-8", "surrogatepass")


LABEL_FILES = damaged(
    st.builds(
        file_of, ROWS,
        st.sampled_from(["filename,words", "\ufefffilename,words", "filename, words", "words", "0.png,1"]),
        st.sampled_from(["\n", "\r\n", "\r", "\n\n"]), st.sampled_from([",", ",", "\t", ";"]),
    )
)  # fmt: skip


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    (tmp_path / "set" / "train").mkdir(parents=True)
    for number in range(3):
        draw(str(number), number).save(tmp_path / "set" / f"{number}.png")
    whole = (tmp_path / "set" / "0.png").read_bytes()
    (tmp_path / "set" / "3.png").write_bytes(whole[: len(whole) // 2])
    return tmp_path / "set"


@sizes(80, 1500)
def test_label_files(count: int, leaf: Path) -> None:
    settings = Settings(number="0123456789", **TINY)

    def check(data: bytes) -> None:
        (leaf / "labels.csv").write_bytes(data)
        skipped = Skipped()
        try:
            lines = read_any(leaf, "train_data", settings, skipped)
            kept = keep_trainable(lines, "0123456789, ", settings, skipped)
        except EasyOCRError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1500
            return
        assert skipped.rows == skipped.kept + skipped.counts.total()
        assert all(1 <= len(line.label) <= settings.batch_max_length for line in kept.lines)
        for sentence in skipped.sentences():
            sentence.encode("utf-8", "backslashreplace")

    tried(count, LABEL_FILES, check)


@sizes(80, 1000)
def test_yamls(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "train", numbers(3))
    good = {"number": "0123456789", "train_data": "train", "valid_data": "train", "num_iter": 2, **TINY}
    names = st.sampled_from([*Settings.model_fields, "accel", "freeze_FeatureFxtraction", "saved_model", "lang_list"])
    values = NESTED | st.sampled_from(
        ["0.5-0.5", "a-b", "None", "/", "no.such", "train", "Adam", [0.5, 0.5], ["a", "b"]]
    )
    changed = st.dictionaries(names, values, max_size=3).map(lambda some: {**good, **some})
    path = tmp_path / "net.yaml"
    prepared: list[Any] = []

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            settings, accel = read_settings(path)
            assert isinstance(accel, dict)
            if settings.output_channel * settings.hidden_size <= 4096 and settings.imgH <= 256:
                prepared.append(prepare(settings))
        except EasyOCRError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 1500

    tried(count, yaml_files(changed), check)
    assert prepared
