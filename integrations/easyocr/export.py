"""The three files that `easyocr.Reader(recog_network=NAME)` loads: NAME.pth, NAME.yaml, NAME.py.

The Reader's CPU path cuts seven characters off every key and its GPU path loads strictly into DataParallel: both
want exactly `module.` + the bare name. A `symbols` key in the yaml would silence characters, so there is none.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml
from torch import Tensor

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.network import MODULES, Features
from integrations.easyocr.reader import Exported
from integrations.easyocr.weights import PREFIX
from integrations.easyocr.writer import Writer


def check_name(name: str, folder: Path | None = None) -> None:
    """Refuses names that the Reader cannot import: it appends the folder to sys.path and imports NAME.

    Raises:
        EasyOCRError: not an identifier, a name of EasyOCR's own networks, or one that resolves to another module.
    """
    from easyocr.config import recognition_models

    own = {"standard", "generation1", "generation2", *recognition_models["gen1"], *recognition_models["gen2"]}
    allowed = "allowed is a Python identifier that is neither EasyOCR's own network nor an importable module"
    if not name.isidentifier():
        raise EasyOCRError(f"experiment_name={name!r}: the Reader cannot import it as a network; {allowed}")
    if name in own:
        raise EasyOCRError(f"experiment_name={name!r}: is a network of EasyOCR itself; {allowed}")
    if name in _SPECIAL:
        raise EasyOCRError(
            f"experiment_name={name!r}: the Reader {_SPECIAL[name]} for a network of that name; allowed is another name"
        )
    if len(name.encode()) > _LONGEST:
        raise EasyOCRError(f"experiment_name={name[:20]}…: is {len(name.encode())} bytes long, allowed are {_LONGEST}")
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # loaded already, and from no file: `__main__`
        raise EasyOCRError(f"experiment_name={name!r}: is a module of Python's own; {allowed}") from None
    if found is not None and found.origin is None and name not in sys.modules:
        found = None  # a bare folder, such as this run's own: a module of that name comes before it
    origin = Path(found.origin).resolve() if found and found.origin and found.has_location else None
    ours = (folder / f"{name}.py").resolve() if folder else None
    written_by_us = origin is not None and (origin == ours or _is_ours(origin))
    if name in sys.builtin_module_names or (found is not None and not written_by_us):
        where = f" ({origin})" if origin else ""
        raise EasyOCRError(
            f"experiment_name={name!r}: Python finds another module of that name first{where}; {allowed}"
        )


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8").startswith(_MARK)
    except (OSError, UnicodeDecodeError):
        return False


# Names that the Reader compares with: `model_lang` in its `recognize`.
_SPECIAL = {
    "arabic": "turns every text round",
    "chinese_sim": "decodes greedily, whatever is asked,",
    "chinese_tra": "decodes greedily, whatever is asked,",
}
_LONGEST = 200  # bytes of a name; file systems allow 255, and unfinished files carry more than the name
_MARK = '"""Recognizer network for easyocr.Reader'


def write(
    folder: Path,
    name: str,
    state: Mapping[str, Tensor],
    *,
    features: Features,
    params: dict[str, int],
    height: int,
    characters: str,
    lang_list: list[str],
    writer: Writer,
) -> Exported:
    """Writes the three files under `folder` (`model/`, `user_network/`).

    Args:
        folder: of the experiment.
        name: of the network, a Python identifier.
        state: bare or `module.` names; written as contiguous fp32 on the CPU (counters stay int64).
        features: the feature extractor's kind, VGG or ResNet.
        params: input_channel, output_channel, hidden_size.
        height: of the input, px.
        characters: of the set, in the order of the classes.
        lang_list: languages that the Reader may be opened with.
        writer: `writer(path, fill)` calls `fill(file)` and leaves the old file or the new one, never a part.

    Raises:
        EasyOCRError: a bad name, or a character set that YAML cannot carry.
    """
    exported = Exported.under(folder, name)
    check_name(name, exported.user_network_directory)
    text = _yaml(params, height, lang_list, characters)
    for directory in (exported.model_storage_directory, exported.user_network_directory):
        directory.mkdir(parents=True, exist_ok=True)
    weights, network, module = exported.files
    tensors = {PREFIX + key.removeprefix(PREFIX): _plain(value) for key, value in state.items()}
    writer(weights, lambda file: torch.save(tensors, file))
    writer(network, lambda file: file.write(text.encode("utf-8")))
    source = f'{_MARK} {name}."""\n\nfrom {MODULES[features]} import Model  # noqa: F401\n'
    writer(module, lambda file: file.write(source.encode("utf-8")))
    return exported


def _yaml(params: dict[str, int], height: int, lang_list: list[str], characters: str) -> str:
    text: str = yaml.safe_dump(
        {"network_params": params, "imgH": height, "lang_list": lang_list, "character_list": characters},
        allow_unicode=True,
        sort_keys=False,
        width=2**20,
        default_style=None,
    )
    if yaml.load(text, Loader=yaml.FullLoader)["character_list"] != characters:
        # Characters that plain Unicode output does not carry are written as escapes.
        text = yaml.safe_dump(
            {"network_params": params, "imgH": height, "lang_list": lang_list, "character_list": characters},
            sort_keys=False,
            width=2**20,
        )
    if yaml.load(text, Loader=yaml.FullLoader)["character_list"] != characters:
        raise EasyOCRError(f"character set {characters!r}: does not survive the Reader's yaml")
    return text


def _plain(value: Tensor) -> Tensor:
    value = value.detach().to("cpu")
    value = value.float() if value.is_floating_point() else value
    return value.contiguous().clone()
