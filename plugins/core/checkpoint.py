"""Files that are old or new, never half; random state; the state that a host's own checkpoint leaves out.

The extra state lies beside the host's checkpoint, in a file that carries the checkpoint's SHA-256. It is written
first and under its own name, and older ones are removed after the checkpoint took its place: a kill at any instant
leaves a checkpoint together with the state that belongs to it.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_map

from plugins.core import devices

SUFFIX = ".accel"
IDENTITY = 12  # hexadecimal digits of the checkpoint's SHA-256 in the name


class DamagedState(ValueError):
    """Extra state that cannot be read; the message is one line that names the file."""


class AtomicPath(type(Path())):  # type: ignore[misc]
    """A path whose `write_bytes` is atomic, and whose children (`path / name`) are such paths too.

    `around(path, data)`, where set on an instance, is a context manager that the write happens in.
    """

    around: Callable[[Path, memoryview], AbstractContextManager[None]] | None = None

    def write_bytes(self, data: Any) -> int:
        view = memoryview(data)
        with self.around(self, view) if self.around is not None else nullcontext():
            write_atomically(self, lambda file: file.write(view))
        return view.nbytes


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that it is the old one or the new one at every instant, also after a power cut.

    Raises:
        OSError: disk full, read-only, ...; the old file is untouched, the unfinished one removed, and the message
            names the file.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _naming(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        _keep_mode(path, name)
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _naming(path, error) from error
        raise
    _sync_folder(path.parent)


def _naming(path: Path, error: OSError) -> OSError:
    """The same error, with the file that was to be written in place of the temporary one."""
    if error.errno is None:
        return OSError(f"{error}: cannot write: {str(path)!r}")
    return OSError(error.errno, f"{error.strerror}: cannot write", str(path))


def sweep(folder: Path) -> None:
    """Remove unfinished files that a killed process left."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def clean_key(key: str) -> str:
    """A state-dict key without what compile and parallel wrappers put in front."""
    return key.replace("_orig_mod.", "").removeprefix("module.")


def own_name(name: str) -> str:
    """A bare model's name of a parameter, without what `torch.compile` of a part of it put in between."""
    return name.replace("_orig_mod.", "")


def own_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state dict under its own names."""
    return {own_name(name): value for name, value in model.state_dict().items()}


def load_own_state(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """The opposite of `own_state`, whatever of the model is compiled now."""
    here = {own_name(name): name for name in model.state_dict()}
    model.load_state_dict({here.get(name, name): value for name, value in state.items()})


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The host's own module inside DistributedDataParallel and an `OptimizedModule`."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def beside(checkpoint: Path, identity: str) -> Path:
    """Where the extra state of this checkpoint lies: `last.0123456789ab.accel`."""
    return checkpoint.with_name(f"{checkpoint.stem}.{identity[:IDENTITY]}{SUFFIX}")


def on_cpu(state: Any) -> Any:
    """The same dicts, lists and values with every tensor on the CPU: a file that loads where this device is not.

    Tensors that are one on the device (tied weights) are one on the CPU.
    """
    moved: dict[Any, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
            return value
        place = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype
        if place not in moved:
            moved[place] = value.detach().cpu()
        return moved[place]

    return tree_map(move, state)


def save_beside(checkpoint: Path, data: bytes | memoryview, state: Mapping[str, Any]) -> Path:
    """Write the extra state that belongs to a checkpoint about to hold `data`; returns its path."""
    identity = hashlib.sha256(data).hexdigest()
    target = beside(checkpoint, identity)
    buffer = io.BytesIO()
    torch.save({"checkpoint": identity, **on_cpu(state)}, buffer)
    write_atomically(target, lambda file: file.write(buffer.getbuffer()))
    return target


def load_beside(checkpoint: Path) -> dict[str, Any] | None:
    """The extra state that belongs to this very checkpoint, or None (a host's own, or one written by another run).

    Raises:
        DamagedState
    """
    identity = digest(checkpoint)
    target = beside(checkpoint, identity)
    if not target.is_file():
        return None
    try:
        state = torch.load(target, map_location="cpu", weights_only=True)
        return dict(state) if state["checkpoint"] == identity else None
    except Exception as error:
        raise DamagedState(f"{target}: damaged ({type(error).__name__})") from None


def drop_beside(checkpoint: Path, keep: Path | None = None) -> None:
    """Remove the extra state of earlier writes of this checkpoint."""
    identity = "[0-9a-f]" * IDENTITY
    for old in checkpoint.parent.glob(f"{glob.escape(checkpoint.stem)}.{identity}{SUFFIX}"):
        if old != keep:
            old.unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """Python's, NumPy's, torch's and the accelerators' generators, as values that `weights_only` loading allows."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": devices.random_states(),  # its name since the first release; of whatever accelerator
    }
    try:
        import numpy
    except ImportError:
        return state
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state["numpy"] = [kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), position, has_gauss, cached]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"].cpu())
    devices.set_random_states(state["cuda"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))


def seed_everything(seed: int) -> None:
    """All generators of this process; loader workers derive theirs from torch's."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy

        numpy.random.seed(seed % 2**32)
    except ImportError:
        pass


def _keep_mode(path: Path, temporary: str) -> None:
    """A temporary file is private; give the result the mode that an ordinary write would have given."""
    if path.exists():
        mode = path.stat().st_mode & 0o777
    else:
        mask = os.umask(0)
        os.umask(mask)
        mode = 0o666 & ~mask
    Path(temporary).chmod(mode)


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows cannot open a folder
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
