"""Continuing from weights: EasyOCR's own (gen1, gen2), an exported NAME.pth, or an official trainer's checkpoint.

Files are read with `weights_only=True`. Keys may carry `module.`; a changed character set keeps the rows of shared
characters exactly, so that their logits are the same before the first step.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from integrations.easyocr.errors import EasyOCRError
from integrations.shared.yaml_file import UnreadableYaml, read_yaml

PREFIX = "module."
_WRAPPED = re.compile(r"^(?:module\.|_orig_mod\.)+|_orig_mod\.")  # DataParallel and torch.compile, in any order
HEAD = ("Prediction.weight", "Prediction.bias")


@dataclass(frozen=True)
class Taken:
    """What a model took over. added, dropped: characters; missing, unexpected: parameter names (only with FT)."""

    added: str = ""
    dropped: str = ""
    fresh_head: bool = False
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def sentence(self, name: str) -> str:
        """What was taken over, in one line; `name` is that of the file."""
        parts = [f"continues from {name}"]
        if self.fresh_head:
            parts.append("with a fresh prediction layer (new_prediction)")
        if self.added or self.dropped:
            parts.append(f"characters added: {self.added or 'none'}, dropped: {self.dropped or 'none'}")
        if self.missing:
            parts.append(f"not in the file, left fresh: {', '.join(self.missing)}")
        if self.unexpected:
            parts.append(f"in the file, not used: {', '.join(self.unexpected)}")
        return "; ".join(parts)


def _parameters(saved: Any, path: Path) -> dict[str, Tensor]:
    """Bare parameter name -> tensor, on the CPU; of a checkpoint to resume from the averaged weights, if it has any.

    Raises:
        EasyOCRError: `saved`, which `path` holds, is anything but tensors of finite values.
    """
    state = saved
    if isinstance(saved, dict) and isinstance(saved.get("state_dict"), dict):
        state = saved["state_dict"]
    elif isinstance(saved, dict) and isinstance(saved.get("model"), dict):
        # Integer counters and tied names may be missing in the average; it is laid over the rest.
        average = saved.get("average")
        state = {**saved["model"], **(average["shadow"] if isinstance(average, dict) and "shadow" in average else {})}
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise EasyOCRError(f"saved_model={path}: expected a flat mapping of parameter name: tensor")
    posing = next((n for n, v in state.items() if v.numel() * v.element_size() > v.untyped_storage().nbytes()), None)
    if posing is not None:
        raise EasyOCRError(f"saved_model={path}: {posing} has fewer values than its shape; expected trained weights")
    broken = next((n for n, v in state.items() if v.is_floating_point() and not v.isfinite().all()), None)
    if broken is not None:
        raise EasyOCRError(f"saved_model={path}: {broken} holds values that are not finite; expected trained weights")
    return {_WRAPPED.sub("", str(name)): value for name, value in state.items()}


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise EasyOCRError(f"saved_model={path}: no such file; expected a .pth of EasyOCR's own networks")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Torch's message begins with advice to load without its checks; what it met stands behind this mark.
        _, _, met = str(error).partition("WeightsUnpickler error: ")
        why = (met or "no file of torch").split(". Please use", 1)[0].splitlines()[0]
    except Exception as error:  # the unpickler runs on whatever bytes there are
        told = str(error) if isinstance(error, (RuntimeError, OSError)) else ""
        why = next(iter(told.splitlines()), "").split(". ", 1)[0]
    why = why or "empty, or no file of torch"
    raise EasyOCRError(f"saved_model={path}: not readable as weights: {why}")


def _characters_in(saved: Any, path: Path, given: str) -> str | None:
    """The character set that `saved`, which `path` holds, was trained with, or None where nothing tells.

    Looked up in this order: given, what the file itself says, a NAME.yaml that describes it, EasyOCR's own list,
    and what an experiment folder says of its best weights.
    """
    if given:
        return given
    if (own := _characters_of_checkpoint(saved)) is not None:
        return own
    beside = path.with_suffix(".yaml")
    for candidate in (beside, path.parent.parent / "user_network" / beside.name):
        if (written := _characters_of_yaml(candidate)) is not None:
            return written
    from easyocr.config import recognition_models

    for generation in ("gen2", "gen1"):
        for model in recognition_models[generation].values():
            if model["filename"] == path.name:
                return str(model["characters"])
    return _characters_of_experiment(path.parent)


def _characters_of_experiment(folder: Path) -> str | None:
    """Of the run whose folder this is: this loop's (user_network/, last.pt) or the official trainer's (opt.txt)."""
    last, options = folder / "last.pt", folder / "opt.txt"
    if (written := _characters_of_yaml(folder / "user_network" / f"{folder.resolve().name}.yaml")) is not None:
        return written
    if last.is_file() and (own := _characters_of_checkpoint(_loaded(last))) is not None:
        return own
    if options.is_file():
        rows = options.read_text(encoding="utf-8", errors="replace").split("\n")
        told = [row.removeprefix("character: ") for row in rows if row.startswith("character: ")]
        return told[-1] if told else None  # every start of the official trainer appends to the file
    return None


def _characters_of_checkpoint(saved: Any) -> str | None:
    extra = saved.get("extra") if isinstance(saved, dict) else None
    characters = extra.get("characters") if isinstance(extra, dict) else None
    return characters if isinstance(characters, str) else None


def _characters_of_yaml(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        written, _ = read_yaml(path)
    except (UnreadableYaml, OSError):
        raise EasyOCRError(
            f"{path}: not readable as YAML; expected the character_list of saved_model, or saved_characters instead"
        ) from None
    characters = written.get("character_list") if isinstance(written, dict) else None
    return characters if isinstance(characters, str) else None


@torch.no_grad()
def take_over(
    model: nn.Module,
    path: Path,
    characters: str,
    *,
    given: str = "",
    partial: bool = False,
    fresh_head: bool = False,
) -> Taken:
    """Loads `path` into `model`, whose classes are the blank and `characters`.

    Args:
        model: the recognizer, changed in place.
        path: EasyOCR's own weights, an exported network, a last.pt or an official checkpoint.
        characters: of this run, in the order of its classes.
        given: the file's character set, where it is neither EasyOCR's own nor described beside the file.
        partial: `FT`: parameters that the file lacks stay fresh and superfluous ones are ignored.
        fresh_head: `new_prediction`: the prediction layer starts anew.

    Raises:
        EasyOCRError: another architecture, or another number of characters than the file's set explains.
    """
    saved = _loaded(path)  # once: a large file on a slow disk
    state, own = _parameters(saved, path), model.state_dict()
    if not set(state) & set(own):
        raise EasyOCRError(
            f"saved_model={path}: another architecture: it holds {next(iter(state))}, "
            f"expected names such as {next(iter(own))}"
        )
    added = dropped = ""
    if fresh_head:
        state = {name: value for name, value in state.items() if name not in HEAD} | {n: own[n] for n in HEAD}
    elif set(HEAD) & set(state):
        _check_head(state, path)
        known = _known_characters(_characters_in(saved, path, given), path, state[HEAD[0]].size(0), characters)
        added = "".join(c for c in dict.fromkeys(characters) if c not in set(known))
        dropped = "".join(c for c in dict.fromkeys(known) if c not in set(characters))
        if known != characters:
            _move_rows(state, own, known, characters, path)
    for name, value in own.items():
        if name in state and state[name].shape != value.shape:
            raise EasyOCRError(
                f"saved_model={path}: another architecture: {name} is {list(state[name].shape)}, this network's is "
                f"{list(value.shape)}; check FeatureExtraction, output_channel and hidden_size"
            )
    missing, unexpected = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if (missing or unexpected) and not partial:
        raise EasyOCRError(
            f"saved_model={path}: another architecture: {len(missing)} parameters missing "
            f"({', '.join(missing[:3]) or 'none'}), {len(unexpected)} unexpected "
            f"({', '.join(unexpected[:3]) or 'none'}); FT: True takes over what fits"
        )
    model.load_state_dict({**own, **{name: value for name, value in state.items() if name in own}})
    return Taken(added, dropped, fresh_head, tuple(missing), tuple(unexpected))


def _check_head(state: dict[str, Tensor], path: Path) -> None:
    weight, bias = (state.get(name) for name in HEAD)
    if weight is None or bias is None or weight.dim() != 2 or bias.shape != weight.shape[:1]:
        found = {name: list(state[name].shape) if name in state else "missing" for name in HEAD}
        raise EasyOCRError(
            f"saved_model={path}: another architecture: {HEAD[0]} is {found[HEAD[0]]} and {HEAD[1]} {found[HEAD[1]]}, "
            "expected [classes, hidden_size] and [classes]; new_prediction: True starts the prediction layer anew"
        )


def _known_characters(known: str | None, path: Path, classes: int, characters: str) -> str:
    if known is None:
        # The same number of classes is no sign of the same order, and rows on wrong characters would stay unseen.
        raise EasyOCRError(
            f"saved_model={path}: nothing beside it tells its {classes - 1} characters (the configuration has "
            f"{len(characters)}); give the file's own, in order, as saved_characters, or start the prediction layer "
            "anew with new_prediction: True"
        )
    if len(known) + 1 != classes:
        raise EasyOCRError(
            f"saved_model={path}: it has {classes - 1} characters, but its character set holds {len(known)}; "
            "give the file's own as saved_characters"
        )
    return known


def _move_rows(state: dict[str, Tensor], own: dict[str, Tensor], known: str, characters: str, path: Path) -> None:
    """Rows of shared characters, and the blank's, go to their new places; added characters keep a fresh row."""
    if state[HEAD[0]].shape[1:] != own[HEAD[0]].shape[1:]:
        raise EasyOCRError(
            f"saved_model={path}: another architecture: {HEAD[0]} is {list(state[HEAD[0]].shape)}, this network's "
            f"is {list(own[HEAD[0]].shape)}; check hidden_size"
        )
    # A duplicate's last place counts: it is the one that EasyOCR's converter encodes with.
    place = {character: index + 1 for index, character in enumerate(known)}
    for name in HEAD:
        rows = own[name].clone()
        rows[0] = state[name][0]
        for index, character in enumerate(characters):
            if character in place:
                rows[index + 1] = state[name][place[character]]
        state[name] = rows
