"""`callbacks=MODULE,…` and `accel.FIELD=VALUE` in the host's own command line.

The host refuses both, as it knows neither. Here they are taken out of `sys.argv` (in place: the host keeps
that list), everything else stays as it was typed, and every model of the command gets the modules' functions.

A listed module offers `callbacks`, a dict of event -> function or list of functions, as in the host's own
integrations; or `configure(options, host_args)`, which returns such a dict. `options` holds the accel fields
as typed, `host_args` the rest of the command as the host reads it; a ValueError is shown as one line.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ultralytics import cfg as host_cfg
from ultralytics.utils.callbacks.base import default_callbacks

from integrations.ultralytics.command_line import ALLOWED, KEY, PREFIX, Command, CommandError, split

Callback = Callable[[Any], Any]
Callbacks = dict[str, list[Callback]]


def run(host: Callable[[], object], default_modules: Sequence[str] = ()) -> object:
    """Run the host's entry point on `sys.argv`, with the listed modules (and `default_modules`) plugged in.

    A mistake in our arguments, or an error later on that is `one_line`, ends the process with one line, exit code 1.
    """
    try:
        command = split(sys.argv[1:], default_modules)
        callbacks = load(command)
    except CommandError as error:
        _fail(error)
    sys.argv[1:] = [*command.argv, *_laid_over(command)]
    with on_every_model(callbacks):
        try:
            return host()
        except ValueError as error:
            if getattr(error, "one_line", False):
                _fail(error)
            raise


def main(argv: Sequence[str], default_modules: Sequence[str]) -> object:
    """The `yolo` command without its script, for `python -m plugins.yolo train …`; `argv` is as in `sys.argv`.

    `default_modules` are always plugged in. They are imported by name, also if one of them is running as
    `__main__`, so that worker processes can import the same functions.
    """
    sys.argv[:] = ["yolo", *argv[1:]]  # the host knows its command by this name
    return run(host_cfg.entrypoint, default_modules)


def load(command: Command) -> Callbacks:
    """Import the command's modules and collect their functions by event.

    The current directory is looked in last: a console script does not have it on its path. The host hands
    the path on to its worker processes. Raises CommandError.
    """
    if command.modules and not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    collected: Callbacks = {}
    readers = 0
    for name in command.modules:
        module = _import(name)
        configure = getattr(module, "configure", None)
        if callable(configure):
            readers += 1
            try:
                callbacks = configure(dict(command.options), dict(command.host_args))
            except ValueError as error:
                raise CommandError(str(error)) from error
        elif hasattr(module, KEY):
            callbacks = module.callbacks
        else:
            raise CommandError(
                f"callbacks={name}: {_file(module)} has no `callbacks`; expected a dict of event -> function"
            )
        for event, functions in _checked(name, callbacks):
            collected.setdefault(event, []).extend(functions)
    if command.options and not readers:
        field_, value = next(iter(command.options.items()))
        names = ",".join(command.modules)
        raise CommandError(
            f"{PREFIX}{field_}={value}: callbacks={names} reads no settings; add plugins.yolo to the list"
        )
    return collected


@contextmanager
def on_every_model(callbacks: Callbacks) -> Iterator[None]:
    """Within this context every model of the host is made with these callbacks, and so are its trainers.

    A function with a true attribute `first` goes before all others of its event. (A plug puts a resumed run's state
    back there, before users' callbacks set theirs.)

    The host's table of default callbacks would be simpler, but `train` over a list of data sets starts worker
    commands where a model holds nothing beyond the defaults, and the callbacks would be lost there.
    """
    from ultralytics.engine.model import Model  # imports torch: only once the command is known to be right

    init = Model.__init__

    @functools.wraps(init)
    def with_callbacks(self: Model, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for event, functions in callbacks.items():
            for function in functions:
                listed = self.callbacks[event]
                if function not in listed:  # a model made from a model shares its lists
                    listed.insert(0 if getattr(function, "first", False) else len(listed), function)

    Model.__init__ = with_callbacks  # type: ignore[method-assign]
    try:
        yield
    finally:
        Model.__init__ = init  # type: ignore[method-assign]


def _import(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")) or name.endswith(".py"):
        raise CommandError(f"callbacks={name}: not the name of a module (no path, no .py); {ALLOWED}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise CommandError(f"callbacks={name}: {_what(error)}{_where(error)}") from error
        parent = sys.modules.get(error.name.rpartition(".")[0])
        looked = f"in the package {_file(parent)}" if parent else "in the current directory and Python's path"
        raise CommandError(f"callbacks={name}: no module '{error.name}' {looked}; {ALLOWED}") from error
    except (Exception, SystemExit) as error:
        raise CommandError(f"callbacks={name}: {_what(error)}{_where(error)}") from error


def _checked(name: str, callbacks: object) -> Iterator[tuple[str, list[Callback]]]:
    """Events and functions of one module. Raises CommandError on a wrong type or an unknown event."""
    expected = "expected a dict of event -> function, or list of functions"
    if not isinstance(callbacks, Mapping):
        raise CommandError(f"callbacks={name}: `callbacks` is of type {type(callbacks).__name__}; {expected}")
    for event, functions in callbacks.items():
        if event not in default_callbacks:
            raise CommandError(f"callbacks={name}: unknown event {event!r}; allowed are {', '.join(default_callbacks)}")
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        for function in functions:
            if not callable(function):
                raise CommandError(f"callbacks={name}: {event} holds {function!r}; {expected}")
        yield event, functions


def _laid_over(command: Command) -> Iterator[str]:
    """What the modules lay over the host's own arguments, by a function `host_arguments`; the last one wins."""
    for name in command.modules if command.host_args.get("mode") == "train" else ():
        for key, value in getattr(_import(name), "host_arguments", dict)().items():
            yield f"{key}={value}"


def _file(module: ModuleType | None) -> str:
    return str(getattr(module, "__file__", None) or getattr(module, "__name__", module))


def _what(error: BaseException) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"importing it raised {type(error).__name__}: {message}"


def _where(error: BaseException) -> str:
    """` (FILE:LINE)` of an error while importing: the deepest line that is the user's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in {__file__, importlib.__file__}
    ]
    libraries = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    last = (own or frames)[-1:]
    return f" ({last[0].filename}:{last[0].lineno})" if last else ""


def _fail(error: Exception) -> NoReturn:
    print(f"accel-plugins: {error}", file=sys.stderr)
    raise SystemExit(1)
