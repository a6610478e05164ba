"""`callbacks=MODULE,…` and `accel.FIELD=VALUE` of a command line, told apart from the host's own arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ultralytics import cfg as host_cfg

from integrations.refusal import Refusal

KEY = "callbacks"
PREFIX = "accel."
ALLOWED = "callbacks= takes a comma-separated list of importable modules, such as plugins.yolo"


class CommandError(Refusal):
    """A mistake in the command, as one line that names the argument, the value and what is allowed."""


@dataclass(frozen=True)
class Command:
    """A command line taken apart: what the host gets, and what is ours."""

    argv: list[str]
    modules: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    host_args: dict[str, Any] = field(default_factory=dict)


def split(argv: Sequence[str], default_modules: Sequence[str] = ()) -> Command:
    """Take our arguments out of `argv` (without the program's name); the others are kept as they are.

    The host's own function joins the fragments (`a = b`, `a= b`, `[1, 2]`), so that ours are found in every
    spelling that it accepts. A line that it cannot join, or would join differently once ours are gone
    (`name= callbacks=x train`), is wrong with or without us: it goes to the host whole, for its own message.

    Modules of a repeated `callbacks=` add up; of a repeated accel field the last wins, as in the host.
    Raises CommandError on an argument of ours without a value, and on accel fields without a module.
    """
    given = list(argv)
    modules, options = list(default_modules), dict[str, str]()
    joined = _join(given)
    spans = _spans(given, joined)
    ours = [_is_ours(argument) for argument in joined]
    gone = {i for span, mine in zip(spans, ours, strict=False) if mine for i in span}
    kept = [argument for i, argument in enumerate(given) if i not in gone]
    theirs = [argument for argument, mine in zip(joined, ours, strict=True) if not mine]
    if len(spans) != len(joined) or _join(kept) != theirs:
        return Command(given, modules, options, _host_args(joined))
    for key, value in (_key_value(argument) for argument, mine in zip(joined, ours, strict=True) if mine):
        if key == KEY:
            modules += _modules(value)
        elif value:
            options[key.removeprefix(PREFIX)] = value
        else:
            raise CommandError(f"{key}=: the value is missing; write {key}=VALUE")
    if options and not modules:
        name, value = next(iter(options.items()))
        raise CommandError(f"{PREFIX}{name}={value}: add callbacks=plugins.yolo, which reads this setting")
    return Command(kept, list(dict.fromkeys(modules)), options, _host_args(theirs))


def _join(argv: list[str]) -> list[str]:
    """The host's arguments after its joining; nothing where it refuses the line."""
    try:
        return list(host_cfg.merge_equals_args(argv))
    except (SyntaxError, IndexError):
        return []


def _spans(argv: list[str], joined: list[str]) -> list[range]:
    """Which arguments each joined one is made of: always neighbours, put together without change."""
    spans: list[range] = []
    start = 0
    for text in joined:
        stop, found = start, None
        while found != text:
            if stop == len(argv):
                return spans
            stop += 1
            found = "".join(argv[start:stop])
        spans.append(range(start, stop))
        start = stop
    return spans


def _plain(argument: str) -> str:
    """The host forgives two leading dashes and one trailing comma."""
    return argument.removeprefix("--").removesuffix(",")


def _key_value(argument: str) -> tuple[str, str]:
    key, _, value = _plain(argument).partition("=")
    return key.strip(), value.strip()


def _is_ours(argument: str) -> bool:
    key, _ = _key_value(argument)
    return "=" in argument and (key == KEY or key.startswith(PREFIX))


def _modules(value: str) -> list[str]:
    names = [name.strip(" '\"") for name in value.strip("[]() ").split(",")]
    if not any(names):
        raise CommandError(f"callbacks={value}: the value is missing; {ALLOWED}")
    return [name for name in names if name]


def _host_args(joined: list[str]) -> dict[str, Any]:
    """The host's arguments by name, values as it reads them; what it will refuse is left out."""
    found: dict[str, Any] = {}
    for argument in map(_plain, joined):
        if "=" in argument:
            try:
                key, value = host_cfg.parse_key_value_pair(argument)
            except (NameError, SyntaxError, ValueError, AssertionError):
                continue
            found[key] = value
        elif argument in host_cfg.MODES:
            found["mode"] = argument
        elif argument in host_cfg.TASKS:
            found["task"] = argument
        elif isinstance(host_cfg.DEFAULT_CFG_DICT.get(argument), bool):
            found[argument] = True
    return found
