"""Start-up hook of the stock `yolo` and `ultralytics` commands, imported by the line in `accel_plugins.pth`.

`accel` starts here too. That line runs while the interpreter still collects its paths, so nothing but the standard
library may be imported here: `arm()` only waits for `ultralytics.cfg` and puts our entry point in front of the host's.
What happens then is written in `integrations/ultralytics/command.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

HOST = "ultralytics.cfg"
OURS = ("integrations", "plugins")


class _Wait:
    """A finder that finds nothing itself: it sees the import of `HOST`, once, and acts after it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _stand_in_front(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this import's loader only
        return spec


def arm() -> None:
    """Wait for the host's command. Called twice (two installations in sight), it waits once."""
    if HOST not in sys.modules and not any(isinstance(finder, _Wait) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Wait())


def _stand_in_front(module: ModuleType) -> None:
    """Replace the host's entry point, before the console script takes it, by one that looks at `sys.argv`."""
    host: Callable[..., object] = module.entrypoint

    @functools.wraps(host)
    def entrypoint(debug: str = "") -> object:
        if debug:  # a command given as text has nothing to do with this process's arguments
            return host(debug)
        if complaint := shadowed(sys.argv):
            print(f"accel-plugins: {complaint}", file=sys.stderr)
            raise SystemExit(1)
        from integrations.ultralytics import command

        return command.run(host)

    module.entrypoint = entrypoint  # type: ignore[attr-defined]


def accel() -> None:
    """Entry point of `accel`: where another package has our name, that is said in one line."""
    if complaint := shadowed(["plugins.yolo"]):
        print(f"accel: {complaint}", file=sys.stderr)
        raise SystemExit(1)
    from plugins.cli import main

    main()


def shadowed(argv: Sequence[str]) -> str | None:
    """One line on the first of our packages that Python finds elsewhere, or None.

    Our `plugins` is only asked for where the command names it: a user's own package of that name may hold
    callbacks of his own.
    """
    root = _root()
    for name in OURS if any("plugins.yolo" in argument for argument in argv) else OURS[:1]:
        spec = importlib.util.find_spec(name)
        found = _place(spec)
        expected = root / name / "__init__.py"
        if found is None or found.resolve() != expected.resolve():
            return (
                f"another package named {name} is in the way: found {found or 'none'}, expected {expected}; "
                "rename it or take its folder off PYTHONPATH"
            )
    return None


def _place(spec: ModuleSpec | None) -> Path | None:
    """The file of a package; the folder where it has none."""
    if spec is None:
        return None
    return Path(spec.origin or next(iter(spec.submodule_search_locations or ()), spec.name))


def _root() -> Path:
    """The folder of our packages: beside this file, or, in an editable install, beside its original."""
    here = Path(__file__)
    for folder in (here.parent, *map(Path, sys.path)):
        if (folder / here.name).is_file() and (folder / "plugins" / "__init__.py").is_file():
            return folder
    return here.parent
