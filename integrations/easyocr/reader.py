"""An exported network, and `easyocr.Reader` on it: with the detector from where EasyOCR keeps it, beside other Readers.

EasyOCR looks for the detector in the recognizer's folder, holds a custom network's height in a global of its module,
and takes the network's Python file from `sys.modules`. Readers made here have a folder with both files, and globals
and a network of their own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from integrations.easyocr.errors import EasyOCRError
from integrations.easyocr.settings import home
from integrations.easyocr.text import logical
from integrations.easyocr.writer import Writer

_OPTIONS = {"gpu": False, "quantize": False, "verbose": False, "download_enabled": False}


@dataclass(frozen=True)
class Exported:
    """Where the files lie: `Reader(model_storage_directory=…, user_network_directory=…, recog_network=name)`."""

    name: str
    model_storage_directory: Path
    user_network_directory: Path
    right_to_left: bool = False  # whether it reads in the order of the picture what is to be read from the right

    @classmethod
    def under(cls, folder: Path, name: str) -> Exported:
        """Where they lie in an experiment folder, also once the process is in another current folder."""
        folder = folder.absolute()
        return cls(name, folder / "model", folder / "user_network")

    @property
    def files(self) -> list[Path]:
        """The weights, the settings and the network's code, in this order."""
        return [
            self.model_storage_directory / f"{self.name}.pth",
            self.user_network_directory / f"{self.name}.yaml",
            self.user_network_directory / f"{self.name}.py",
        ]

    def reader(self, lang_list: list[str], **options: Any) -> Any:
        """An `easyocr.Reader` of this network, on the CPU in full precision unless `options` say otherwise."""
        return reader(self, lang_list, **options)

    def source(self, lang_list: list[str]) -> str:
        """The line of Python that opens a bare `easyocr.Reader` on these files."""
        return (
            f"easyocr.Reader({lang_list}, recog_network={self.name!r},"
            f" model_storage_directory={str(self.model_storage_directory)!r},"
            f" user_network_directory={str(self.user_network_directory)!r})"
        )

    def remarks(self) -> list[str]:
        """What a bare Reader on these files needs beyond that line."""
        missing, told = find_detector("craft", [self.model_storage_directory])
        return [
            *([f"this Reader downloads its detector, unless detector=False ({told})"] if missing is None else []),
            *(["set .model_lang = 'arabic' on this Reader: texts are then given as typed"] * self.right_to_left),
        ]


def reader(exported: Exported, lang_list: list[str], **options: Any) -> Any:
    """An `easyocr.Reader` of this network.

    Args:
        exported: where its three files lie.
        lang_list: languages that the network was exported with.
        **options: the Reader's own; on the CPU, in full precision and without downloads unless they say otherwise. A
            `model_storage_directory` is where the detector is looked for first.

    Raises:
        EasyOCRError: the detector is in none of the folders where EasyOCR keeps it.
    """
    asked = {**_OPTIONS, **options}
    given = [Path(home(folder)) for folder in [asked.pop("model_storage_directory", None)] if folder]
    own = exported.model_storage_directory
    network = next((folder for folder in (*given, own) if (folder / f"{exported.name}.pth").is_file()), own)
    code = Path(home(asked.pop("user_network_directory", None) or exported.user_network_directory))
    detector = None
    if asked.get("detector", True):
        folders = [*given, own, *storages()]
        detector, told = find_detector(asked.get("detect_network", "craft"), folders)
        if detector is None and told and not asked["download_enabled"]:
            raise EasyOCRError(
                f"{told}; reader(download_enabled=True) lets EasyOCR fetch it, reader(model_storage_directory=…) names "
                "a folder that holds it, and reader(detector=False).recognize(crop) needs none"
            )
    with _both(network / f"{exported.name}.pth", detector) as storage, _network_of(exported.name, code):
        made = _reader_class(exported, lang_list, options)(
            lang_list,
            recog_network=exported.name,
            model_storage_directory=str(storage),
            user_network_directory=str(code),
            **asked,
        )
    made.model_storage_directory = str(network)
    if exported.right_to_left:
        made.model_lang = "arabic"  # EasyOCR's name for a network whose readings are turned round
    return made


def storages() -> list[Path]:
    """Folders where EasyOCR keeps its own networks: by the environment as EasyOCR read it, and as it is now."""
    from easyocr.config import MODULE_PATH

    now = os.environ.get("EASYOCR_MODULE_PATH") or os.environ.get("MODULE_PATH") or "~/.EasyOCR"
    return [Path(root) / "model" for root in dict.fromkeys([MODULE_PATH.rstrip("/"), str(home(now)).rstrip("/")])]


def find_detector(name: str, folders: Iterable[Path]) -> tuple[Path | None, str]:
    """The file of detector `name`, or None and where it was looked for; (None, "") for a name unknown to EasyOCR."""
    from easyocr.config import detection_models
    from easyocr.utils import calculate_md5

    if name not in detection_models:
        return None, ""  # the Reader says what it knows
    file, damaged = detection_models[name]["filename"], []
    folders = list(dict.fromkeys(folders))
    for folder in folders:
        path = folder / file
        if path.is_file():
            if calculate_md5(str(path)) == detection_models[name]["md5sum"]:
                return path, ""
            damaged.append(f"; the one in {folder} is damaged, or of another release")
    return None, f"{file}: not found in {', '.join(map(str, folders))}" + "".join(damaged)


def place_detector(exported: Exported, others: Iterable[Path], writer: Writer) -> None:
    """Put the detector beside the network, where a bare `easyocr.Reader` looks for it.

    One file under two names, or a copy. Where it is not found, or there is no room, nothing is done.
    """
    from easyocr.config import detection_models

    target = exported.model_storage_directory / detection_models["craft"]["filename"]
    try:
        if target.exists() or target.is_symlink():
            return  # this run's of before, or not ours to replace
        found, _ = find_detector("craft", [*storages(), *others])
        if found is None:
            return
        try:
            target.hardlink_to(found.resolve())
        except OSError:  # another disk, or a file system without links
            with found.open("rb") as source:
                writer(target, lambda file: shutil.copyfileobj(source, file))
    except OSError:
        return


@contextmanager
def _both(weights: Path, detector: Path | None) -> Iterator[Path]:
    """A folder that holds the recognizer's weights and the detector, until the Reader has read them."""
    if detector is None or detector.parent == weights.parent:
        yield weights.parent
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in (weights, detector):
            try:
                (Path(folder) / path.name).symlink_to(path.resolve())
            except OSError:
                shutil.copy(path, folder)
        yield Path(folder)


@contextmanager
def _network_of(name: str, code: Path) -> Iterator[None]:
    """`import NAME` gives the file in `code`, whatever network of that name was imported before."""
    before, paths = sys.modules.get(name), list(sys.path)
    spec = importlib.util.spec_from_file_location(name, code / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield
    finally:
        sys.path[:] = paths  # every Reader adds its folder to it
        if before is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before


def _reader_class(exported: Exported, lang_list: list[str], options: dict[str, Any]) -> Any:
    """A subclass of `easyocr.Reader` whose methods have globals of their own: its height, and how texts are turned."""
    import easyocr.easyocr as host

    own = {**vars(host), "get_display": logical}
    methods: dict[str, Any] = {}
    for name in ("__init__", "recognize"):
        method = getattr(host.Reader, name)
        if getattr(method, "__globals__", None) is vars(host):
            method = FunctionType(method.__code__, own, name, method.__defaults__, method.__closure__)
        methods[name] = method
    # A copy, or a Reader sent to another process, is made anew from the same files.
    methods["__reduce__"] = lambda self: (functools.partial(reader, exported, lang_list, **options), ())
    return type("Reader", (host.Reader,), methods)
