"""From settings to everything that a loop needs: lines, characters, network and its first weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from integrations.easyocr.augment import Augment
from integrations.easyocr.bucketing import WidthBatches
from integrations.easyocr.charset import characters_of, check_languages, languages_told
from integrations.easyocr.data import LineSet, Skipped, keep_trainable, read_any
from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.export import check_name, write
from integrations.easyocr.labels import converter
from integrations.easyocr.network import build, frozen_parts
from integrations.easyocr.preprocess import Preprocess
from integrations.easyocr.reader import Exported
from integrations.easyocr.reading import Readings, read_lines
from integrations.easyocr.settings import Settings, home
from integrations.easyocr.stream import Lines
from integrations.easyocr.text import Spelling, right_to_left, suspicious
from integrations.easyocr.weights import PREFIX, take_over
from integrations.easyocr.writer import Writer


@dataclass
class Prepared:
    """What a run starts from. `notes` are sentences for the user: skipped rows, weights taken over, parts frozen.

    rows: training lines before any was left out.
    """

    settings: Settings
    folder: Path
    characters: str
    codec: Any
    model: nn.Module
    lines: Lines
    sets: list[LineSet]
    valid: LineSet
    preprocess: Preprocess
    notes: list[str]
    rows: int

    @property
    def lost_told(self) -> str:
        """How many of the training lines were left out; empty where none was."""
        used = sum(len(part.lines) for part in self.sets)
        return f"trained on {used} of {self.rows} lines" if used < self.rows else ""

    @property
    def params(self) -> dict[str, int]:
        """Sizes of the network, as the Reader names them."""
        return network_params(self.settings)

    @property
    def exported(self) -> Exported:
        """Where the Reader's three files lie, or will."""
        return self._read_from_the_right(Exported.under(self.folder, self.settings.experiment_name))

    def _read_from_the_right(self, exported: Exported) -> Exported:
        turned = self.settings.label_order == "logical" and right_to_left(self.characters)
        return replace(exported, right_to_left=turned)

    def batches(self, edges: Sequence[int]) -> WidthBatches:
        """The training lines in batches; `edges` in px, the last one holds the widest line."""
        settings = self.settings
        return WidthBatches(
            self.lines.widths(),
            edges,
            settings.batch_size,
            sizes=[len(part.lines) for part in self.sets],
            shares=settings.batch_ratio,
            usage=settings.total_data_usage_ratio,
            seed=settings.manualSeed,
        )

    def read(self, model: nn.Module, device: torch.device) -> Readings:
        """The validation lines, as the Reader reads them."""
        size, decode = self.settings.batch_size, self.settings.decode
        return read_lines(model, self.valid, self.preprocess, self.codec, device, batch_size=size, decode=decode)

    def read_exported(self, device: torch.device) -> Readings:
        """The validation lines, as the network in the Reader's files reads them."""
        model = build(self.settings.FeatureExtraction, len(self.codec.character), self.params)
        state = torch.load(self.exported.files[0], map_location="cpu", weights_only=True)
        model.load_state_dict({name.removeprefix(PREFIX): value for name, value in state.items()})
        return self.read(model.to(device), device)

    def export(self, state: dict[str, Any], writer: Writer, name: str | None = None) -> Exported:
        """Writes the Reader's three files into the experiment folder."""
        exported = write(
            self.folder,
            name or self.settings.experiment_name,
            state,
            features=self.settings.FeatureExtraction,
            params=self.params,
            height=self.settings.imgH,
            characters=self.characters,
            lang_list=self.settings.lang_list,
            writer=writer,
        )
        return self._read_from_the_right(exported)


def network_params(settings: Settings) -> dict[str, int]:
    """input_channel, output_channel and hidden_size."""
    return {name: getattr(settings, name) for name in ("input_channel", "output_channel", "hidden_size")}


def prepare(settings: Settings, train: Any = None, valid: Any = None) -> Prepared:
    """Reads the data and builds the network; nothing is written.

    Args:
        settings: the yaml, checked.
        train: a data set or a folder, instead of `train_data`.
        valid: the same, instead of `valid_data`.

    Raises:
        EasyOCRError: one line that names the file or key, the value and what is allowed.
    """
    folder = Path(settings.output) / settings.experiment_name
    check_name(settings.experiment_name, folder / "user_network")
    check_languages(settings.lang_list)
    lost, lost_valid, notes = Skipped(), Skipped(), []
    sets = [read_any(source, name, settings, lost) for name, source in _training_sources(settings, train)]
    held_out = read_any(_given(valid, settings.valid_data, "valid_data"), "valid_data", settings, lost_valid)
    characters = characters_of(settings, map(Spelling("", settings), _labels(sets)))
    sets = [keep_trainable(part, characters, settings, lost) for part in sets]
    held_out = keep_trainable(held_out, characters, settings, lost_valid)
    for data, rows in (("training", lost), ("validation", lost_valid)):
        told = [*rows.too_long_told(settings.batch_max_length), *rows.sentences(), *rows.remarks]
        notes += [f"{data} data: {sentence}" for sentence in told]
    notes += [f"training data: {sentence}" for sentence in suspicious(_labels(sets))]
    notes += languages_told(characters, settings.lang_list)
    codec = converter(characters)
    preprocess = Preprocess(settings.preprocess, settings.imgH, settings.imgW, settings.PAD)
    model = build(settings.FeatureExtraction, len(codec.character), network_params(settings))
    if settings.saved_model:
        taken = take_over(
            model,
            Path(settings.saved_model),
            characters,
            given=settings.saved_characters,
            partial=settings.FT,
            fresh_head=settings.new_prediction,
        )
        notes.append(taken.sentence(settings.saved_model))
    frozen = frozen_parts(model, settings.freeze_FeatureExtraction, settings.freeze_SequenceModeling)
    if frozen:
        notes.append(f"frozen: {', '.join(frozen)}")
    lines = Lines(
        sets,
        preprocess,
        codec,
        settings.FeatureExtraction,
        settings.contrast_adjust,
        Augment(settings.manualSeed) if settings.augment else None,
    )
    wide = sum(width > settings.imgW for width in lines.widths()) if settings.preprocess == "reader" else 0
    if wide:
        notes.append(f"{wide} lines are wider than imgW={settings.imgW}: kept at their width, as the Reader reads them")
    return Prepared(settings, folder, characters, codec, model, lines, sets, held_out, preprocess, notes, lost.rows)


def _labels(sets: Sequence[LineSet]) -> list[str]:
    return [line.label for part in sets for line in part.lines]


def _training_sources(settings: Settings, train: Any) -> list[tuple[str, Any]]:
    """(name, source) of every selected data set: the folders `train_data/<select>`, or the one that was given."""
    if train is not None and not isinstance(train, (str, Path)):
        if settings.select_data != [""]:
            raise EasyOCRError(f"select_data={settings.select_data}: a data set object has no folders to select from")
        return [("train_data", train)]
    root = Path(_given(train, settings.train_data, "train_data"))
    return [(f"train_data={root / part}", root / part) for part in settings.select_data]


def _given(source: Any, configured: str, key: str) -> Any:
    if source is None and not configured:
        raise EasyOCRError(f"{key}='': expected a folder of images with a labels.csv, or a data set")
    return configured if source is None else home(source)
