"""`accel repair`: a checkpoint saved from a wrapped model becomes one that the model itself loads.

`torch.compile` puts `_orig_mod.` into the names of a state dict, DataParallel and DistributedDataParallel `module.`;
saved so, a checkpoint loads only into a model that is wrapped in the same way.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from plugins.core.checkpoint.atomic_file import write_atomically
from plugins.errors import AccelError

COMPILED = "_orig_mod"
"""The segment that `torch.compile(model)` adds; no module of a user's has this name."""

PARALLEL = "module"
"""The segment of DataParallel and DistributedDataParallel; a user's own module may be called so as well."""

AVERAGED = "n_averaged"
"""The counter that `torch.optim.swa_utils.AveragedModel` keeps beside its `module`."""

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@dataclass
class Repaired:
    """What a repair came to.

    Attributes:
        path: the clean file, or None where nothing had to be renamed.
        renamed: old name to new name, each with the dicts that lead to it: `model/_orig_mod.fc.weight`.
    """

    path: Path | None
    renamed: dict[str, str] = field(default_factory=dict)


def repair(source: Path, output: Path | None = None, trust: bool = False, force: bool = False) -> Repaired:
    """Write a clean copy of a checkpoint; the file itself is left as it is.

    Args:
        source: a .pt, .pth, .bin, .ckpt or .safetensors file.
        output: where to write; `NAME.clean.SUFFIX` beside the file by default.
        trust: also read a file that holds pickled objects. Reading one runs code that its author chose.
        force: write over `output` where it exists.

    Raises:
        AccelError: no such file, one that is no checkpoint or is damaged, one that holds code without `trust`, two
            entries that would get one name, or an output that exists or cannot be written.
    """
    if source.suffix.lower() not in SUFFIXES:
        raise AccelError(f"{source}: expected a checkpoint file, one of {', '.join(SUFFIXES)}")
    if not source.is_file():
        raise AccelError(f"{source}: no such file")
    target = output or source.with_name(f"{source.stem}.clean{source.suffix}")
    if target.exists() and (target.resolve() == source.resolve() or not force):
        raise AccelError(f"{target}: exists already; give another --output{'' if force else ', or --force'}")
    is_safetensors = source.suffix.lower() == ".safetensors"
    content, metadata = _read_safetensors(source) if is_safetensors else (_read_pickle(source, trust), None)
    renamed: dict[str, str] = {}
    try:
        clean = _clean(content, "", renamed)
    except _SameName as error:
        raise AccelError(f"{source}: {error}; nothing was written") from None
    if not renamed:
        return Repaired(None)
    try:
        if is_safetensors:
            _write_safetensors(target, clean, metadata)
        else:
            write_atomically(target, lambda file: torch.save(clean, file))
    except OSError as error:
        raise AccelError(f"{target}: {error.strerror or error}") from None
    return Repaired(target, renamed)


class _SameName(ValueError):
    """Two entries of one dict would get the same name."""


def clean_names(names: list[str]) -> dict[str, str]:
    """Old to new, for all the names of one state dict.

    `_orig_mod` goes wherever it stands. `module` goes where everything beside it goes through it too: a wrapper is its
    parent's only child, which a module of the user's own that happens to be called so hardly ever is.
    """
    paths = {name: [part for part in name.split(".") if part != COMPILED] for name in names}
    while wrapped := _wrapped_at(paths.values()):
        for name, path in paths.items():
            at = next((at for at in range(len(path)) if path[: at + 1] in wrapped), None)
            paths[name] = path if at is None else path[:at] + path[at + 1 :]
    return {name: ".".join(path) for name, path in paths.items()}


def _wrapped_at(paths: Any) -> list[list[str]]:
    """The paths that end in `module`, hold modules or values themselves, and have nothing beside them."""
    children: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for at, part in enumerate(path):
            children.setdefault(tuple(path[:at]), set()).add(part)
    return [
        [*parent, PARALLEL]
        for parent, names in children.items()
        if names - {AVERAGED} == {PARALLEL} and (*parent, PARALLEL) in children
    ]


def _clean(value: Any, where: str, renamed: dict[str, str]) -> Any:
    """The value with clean names, in dicts at any depth; `renamed` is added to."""
    if isinstance(value, nn.Module):
        return _unwrapped(value, where, renamed)
    if isinstance(value, Mapping):
        return _clean_dict(value, where, renamed)
    if isinstance(value, (list, tuple)):
        parts = [_clean(part, f"{where}{index}/", renamed) for index, part in enumerate(value)]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _clean_dict(value: Mapping[Any, Any], where: str, renamed: dict[str, str]) -> Any:
    named = [name for name in value if isinstance(name, str)]
    tensors = [name for name in named if isinstance(value[name], Tensor)]
    # Beside a model's tensors there may be plain values (an epoch), which say nothing about wrappers.
    new_names = clean_names(tensors or named)
    new_names |= {name: _without_compiled(name) for name in named if name not in new_names}
    averaged = AVERAGED in new_names and any(new != _without_compiled(old) for old, new in new_names.items())
    found: dict[Any, Any] = {}
    for name, part in value.items():
        new = new_names.get(name, name)
        if averaged and name == AVERAGED:
            renamed[f"{where}{name}"] = "(left out: the averaging wrapper's counter)"
            continue
        if new in found:
            raise _SameName(f"{where}{name} and another entry would both be called {new!r}")
        if new != name:
            renamed[f"{where}{name}"] = f"{where}{new}"
        found[new] = _clean(part, f"{where}{name}/", renamed)
    if not isinstance(value, dict):
        return found
    made: Any = OrderedDict(found) if isinstance(value, OrderedDict) else found
    if not renamed and all(made[name] is value[name] for name in made):
        return value
    if hasattr(value, "_metadata"):  # versions of the modules, by their names
        made._metadata = {new: value._metadata[old] for old, new in _metadata_names(value._metadata, new_names).items()}
    return made


def _without_compiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != COMPILED) or name


def _metadata_names(modules: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, str]:
    """Module names of `_metadata`, old to new: as the values below each were renamed."""
    found = {}
    for module in modules:
        inside = next((name for name in new_names if name.startswith(f"{module}.")), None) if module else None
        if inside is None:
            found[module] = _without_compiled(module) if module != COMPILED else ""
            continue
        rest = inside.removeprefix(f"{module}.").count(".") + 1
        found[module] = new_names[inside].rsplit(".", rest)[0] if new_names[inside].count(".") >= rest else ""
    return found


def _unwrapped(module: nn.Module, where: str, renamed: dict[str, str]) -> nn.Module:
    """A pickled module without its wrappers, its children likewise."""
    inner = module
    while isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or COMPILED in inner._modules:
        inner = inner._modules[COMPILED if COMPILED in inner._modules else PARALLEL]  # type: ignore[assignment]
    if inner is not module:
        renamed[f"{where.rstrip('/')} ({type(module).__name__})"] = f"{where.rstrip('/')} ({type(inner).__name__})"
    for name, child in list(inner.named_children()):
        clean = _unwrapped(child, f"{where}{name}/", renamed)
        if clean is not child:
            setattr(inner, name, clean)
    return inner


def _read_pickle(source: Path, trust: bool) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error).lower() and "unsupported" not in str(error).lower():
            raise AccelError(f"{source}: not a checkpoint, or a damaged one") from None
        if not trust:
            raise AccelError(
                f"{source}: holds pickled objects, and reading those runs code of whoever wrote the file; "
                "--trust reads it all the same"
            ) from None
    except Exception:
        raise AccelError(f"{source}: not a checkpoint, or a damaged one") from None
    try:
        return torch.load(source, map_location="cpu", weights_only=False)
    except Exception as error:
        raise AccelError(f"{source}: cannot be read ({type(error).__name__}: {error})") from None


def _read_safetensors(source: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    try:
        with safe_open(source, framework="pt") as file:  # type: ignore[no-untyped-call]
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    except (SafetensorError, OSError):
        raise AccelError(f"{source}: not a checkpoint, or a damaged one") from None


def _write_safetensors(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> None:
    data = save(tensors, metadata)
    write_atomically(target, lambda file: file.write(data))
