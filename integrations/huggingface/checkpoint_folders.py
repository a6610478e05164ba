"""Checkpoint folders that are complete or absent.

The host writes `checkpoint-N` in place, file after file, so a killed run leaves half a folder that its own
auto-resume then picks. Here the folder is written under a temporary name beside it, by all ranks, and renamed
once everything is on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
STATE = "accel_state.pt"
TRAINER_STATE = "trainer_state.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")
_SAVED = (
    "optimizer.pt",
    "optimizer.bin",
    "pytorch_model_fsdp*.bin",
    "global_step*/*.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    STATE,
)  # not a user's own files
_SHARDED = ("pytorch_model_fsdp_*", "optimizer_*")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")


def problems(folder: Path) -> list[str]:
    """What is missing from a checkpoint or cut off in it; empty where it is complete.

    The host writes `trainer_state.json` last, so a folder without it was never finished.
    """
    found = []
    try:
        json.loads((folder / TRAINER_STATE).read_text())
    except FileNotFoundError:
        found.append(f"{TRAINER_STATE} is missing")
    except (ValueError, RecursionError):
        found.append(f"{TRAINER_STATE} is cut off")
    weights = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    weights += folder.glob("model-*-of-*.safetensors")
    for index in folder.glob("*.index.json"):
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no index of the host's
            found += [
                f"{name} is missing"
                for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
                if not (folder / name).is_file()
            ]
    if (
        not weights
        and not any(folder.glob("*/adapter_model.safetensors"))
        and not any(folder.glob("pytorch_model_fsdp*"))
    ):
        found.append("model weights are missing")
    for path in weights:
        if path.suffix == ".safetensors" and not _safetensors_complete(path):
            found.append(f"{path.name} is cut off")
    # a sharded state: its list of files is written last
    shards = [path for pattern in _SHARDED for path in folder.glob(pattern) if path.is_dir()]
    found += [f"{path.name} is not finished" for path in shards if not (path / ".metadata").is_file()]
    # DeepSpeed's: what names the folder is written after it
    engines = [path for path in folder.glob("global_step*") if path.is_dir()]
    found += [f"{path.name} is not finished" for path in engines if not (folder / "latest").is_file()]
    # torch.save writes a zip file, whose directory is its last part
    saved = [path for pattern in _SAVED for path in folder.glob(pattern)]
    found += [f"{path.name} is cut off" for path in saved if not zipfile.is_zipfile(path)]
    return found


def newest_complete(run: Path) -> tuple[Path | None, list[str]]:
    """The complete checkpoint with the highest step in a run's folder, and a line for every newer one left out."""
    passed: list[str] = []
    numbered = sorted(
        ((int(match[1]), path) for path in run.glob("checkpoint-*") if (match := _NAME.match(path.name))), reverse=True
    )
    for _, path in numbered:
        if not (wrong := problems(path)):
            return path, passed
        passed.append(f"{path.name} is not complete ({'; '.join(wrong)})")
    return None, passed


def sweep(run: Path) -> None:
    """Remove what a killed run left unfinished; put back a checkpoint that was about to be replaced."""
    for left in run.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for kept in run.glob(f"{REPLACED}*"):
        final = run / kept.name.removeprefix(REPLACED)
        if final.exists():
            shutil.rmtree(kept, ignore_errors=True)
        else:
            kept.rename(final)


@contextmanager
def unfinished(final: Path, main: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Give a temporary run folder; what is written to `<temporary>/<final.name>` becomes `final` at the end.

    Args:
        final: `<run>/checkpoint-N`.
        main: True on the one rank that prepares, renames and cleans up.
        barrier: waits for all ranks.

    An exception (a full disk) removes the temporary folder and leaves an earlier `final` as it was.
    """
    temporary = final.parent / f"{UNFINISHED}{final.name}"
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True, exist_ok=True)
    barrier()
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    barrier()
    if main:
        put_in_place(temporary / final.name, final)
        shutil.rmtree(temporary, ignore_errors=True)
    barrier()


def put_in_place(written: Path, final: Path) -> None:
    """Flush a folder to the disk and rename it; an earlier one of the same name gives way."""
    for path in [p for p in written.rglob("*") if p.is_file()]:
        _flush(path)
    _flush(written)
    if final.exists():
        aside = final.parent / f"{REPLACED}{final.name}"
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        written.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        written.rename(final)
    _flush(final.parent)


def _safetensors_complete(path: Path) -> bool:
    """A safetensors file names its own length: 8 bytes, a JSON header of that size, then the data."""
    size = path.stat().st_size
    if size < 8:
        return False
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return False
    return size == 8 + length + max(ends, default=0)


def _flush(path: Path) -> None:
    with suppress(OSError):  # some file systems cannot flush a folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
