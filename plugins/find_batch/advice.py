"""The command to use: the user's own, with the micro-batch and the effective batch that were found."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.trial_run.command import YOLO

PLUG = "plugins.yolo"
# What scripts call the micro-batch on their command lines; the Trainer's own parser has the first.
OPTIONS = ("per_device_train_batch_size", "train_batch_size", "micro_batch_size", "batch_size", "batch", "bs")
IN_SCRIPT = {
    "huggingface": "TrainingArguments(per_device_train_batch_size={0})",
    "ultralytics": "model.train(batch={0})",
    "lightning": "DataLoader(batch_size={0})",
    "loop": "DataLoader(batch_size={0}), and micro_batch={0} where Accelerated is given one",
    "easyocr": "fit(..., batch_size={0})",
}


@dataclass(frozen=True)
class Advice:
    """What to run.

    Attributes:
        command: the user's own, changed.
        environment: variables to run it with.
        by_hand: what has to be changed in the user's own file first; empty where the command is all.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    by_hand: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """As typed into a shell."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), shlex.join(self.command)])


def advise(command: Sequence[str], micro_batch: int, settings: Mapping[str, Any], host: str) -> Advice:
    """The command with these sizes in it.

    Args:
        command: as the user typed it.
        micro_batch: samples a micro-batch.
        settings: of accel, `effective_batch` among them where one was asked for.
        host: the plug that the command was seen to use, as reports call it.
    """
    if _host(command) == "ultralytics":
        stock = Path(command[0]).name in YOLO
        return Advice(_with_plug(_laid(command, {"batch": micro_batch}, settings, "accel."), stock))
    if _host(command) == "easyocr":
        return Advice(_laid(command, {"batch_size": micro_batch}, settings, ""))
    environment = {f"ACCEL_{name.upper()}": str(value) for name, value in settings.items()}
    changed = _option(command, micro_batch)
    if changed is not None:
        return Advice(changed, environment)
    place = IN_SCRIPT.get(host, "the loader's batch size: {0}").format(micro_batch)
    by_hand = [f"in the script: {place}"]
    if "effective_batch" in settings:
        by_hand.append("accumulate or effective_batch given in the script wins over the environment: leave them out")
    return Advice(list(command), environment, by_hand)


def with_argument(command: Sequence[str], arguments: Mapping[str, str]) -> list[str] | None:
    """The command with an argument of its host's own laid over it.

    Args:
        command: as the user typed it.
        arguments: KEY=VALUE by host.

    Returns:
        None where it is a script's command, whose arguments are unknown, or where the host has no such argument.
    """
    host = _host(command)
    if host not in arguments:
        return None
    name, _, value = arguments[host].partition("=")
    return _laid(command, {name: value}, {}, "")


def _host(command: Sequence[str]) -> str:
    """Of a command that takes KEY=VALUE arguments; empty for a script's."""
    first = Path(command[0]).name
    if first in YOLO or list(command[1:3]) == ["-m", PLUG]:
        return "ultralytics"
    return "easyocr" if first == "accel" else ""


def _laid(command: Sequence[str], sizes: Mapping[str, Any], settings: Mapping[str, Any], prefix: str) -> list[str]:
    """KEY=VALUE arguments replaced; `accumulate` and `effective_batch` replace each other."""
    new = {**sizes, **{f"{prefix}{name}": value for name, value in settings.items()}}
    gone = set(new)
    if "effective_batch" in settings:
        gone.add(f"{prefix}accumulate")
    kept = [word for word in command if word.removeprefix("--").partition("=")[0] not in gone or "=" not in word]
    return [*kept, *(f"{name}={value}" for name, value in new.items())]


def _with_plug(command: list[str], stock: bool) -> list[str]:
    """The stock command with the plug among its callbacks."""
    if not stock:
        return command
    at = next((i for i, word in enumerate(command) if word.removeprefix("--").startswith("callbacks=")), None)
    if at is None:
        return [*command, f"callbacks={PLUG}"]
    names = command[at].partition("=")[2].split(",")
    command[at] = f"callbacks={','.join(names if PLUG in names else [PLUG, *names])}"
    return command


def _option(command: Sequence[str], micro_batch: int) -> list[str] | None:
    """A script's command whose own option for the micro-batch is set; None where it has none."""
    words = list(command)
    for name in OPTIONS:
        for at, word in enumerate(words):
            found = re.fullmatch(rf"(--?{name.replace('_', '[-_]')})(=\d+)?", word)
            if found is None:
                continue
            if found[2]:
                return [*words[:at], f"{found[1]}={micro_batch}", *words[at + 1 :]]
            if at + 1 < len(words) and words[at + 1].isdigit():
                return [*words[: at + 1], str(micro_batch), *words[at + 2 :]]
    return None
