"""Kills short trainings by SIGKILL, resumes them, and compares the end with that of a run that nobody killed.

    python -m tests.trust.kills FOLDER [--host loop huggingface ultralytics easyocr] [--kills 50] [--seconds 600]

Half of the kills come at a random moment, half at a random file operation in the run's folder, so that many fall into
saves. A training is killed one to three times, resumed after each, and must end with the weights of the straight run,
bit for bit. What was tried is kept in FOLDER/kills.json: the same command goes on from there. Trainings are forked from
one process that has imported everything; a folder in memory (/dev/shm) makes them short.
Exit status 1: a resume failed, or ended elsewhere.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from plugins.core.checkpoint.atomic_file import write_atomically
from plugins.core.telemetry import html
from tests.trust.kill_runs import RUNS, Weights

PR_SET_PDEATHSIG = 1  # of Linux: a training does not outlive this process
LONGEST = 120  # s; a training that takes longer hangs
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.copyfile")


@dataclass
class Found:
    """Of one host: kills by kind, trainings that were killed and resumed to their end, and what went wrong."""

    at_a_moment: int = 0
    at_a_file: int = 0
    trainings: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return self.at_a_moment + self.at_a_file


@dataclass(frozen=True)
class Death:
    """When a training is killed: after so many seconds, or at so many file operations in its folder."""

    seconds: float = 0.0
    operation: int = 0


def child(host: str, folder: Path, result: Path, log: Path, death: Death | None) -> int:
    """Fork a training; returns its process id. At its end it leaves its weights in `result`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        seen = count_operations(folder, death.operation if death else 0)
        weights = RUNS[host](folder)
        write_atomically(
            result, lambda f: torch.save({"weights": weights, "operations": seen[0], "modules": list(sys.modules)}, f)
        )
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def count_operations(folder: Path, last: int) -> list[int]:
    """Counts file operations below `folder`; kills this process before operation `last`, if it is not 0."""
    seen, root = [0], str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and any(isinstance(a, (str, Path)) and str(a).startswith(root) for a in arguments[:2]):
            seen[0] += 1
            if seen[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def ended(pid: int, death: Death | None) -> int:
    """Wait for a training, and kill it when its time has come; returns its status, negative for a signal."""
    until = time.monotonic() + (death.seconds if death is not None and death.seconds else LONGEST)
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def difference(one: Weights, other: Weights) -> str:
    """The first name whose values differ, or empty."""
    if one.keys() != other.keys():
        return f"names: {sorted(one.keys() ^ other.keys())[:3]}"
    return next((name for name in one if not torch.equal(one[name], other[name])), "")


class Killing:
    """The kills of one host, in `folder`."""

    def __init__(self, host: str, folder: Path, found: Found, seed: int) -> None:
        self.host, self.folder, self.found = host, folder / host, found
        self.draw = random.Random(f"{host} {seed} {found.kills}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.straight: dict[str, Any] = {}
        self.seconds = 0.0

    def warm(self) -> None:
        """Import what a training imports, by the list of one in another process: threads do not outlive a fork."""
        for name in self._whole(self._empty())["modules"]:
            with suppress(Exception):
                importlib.import_module(name)

    def run_straight(self) -> None:
        """The training that nobody kills, twice: a run that does not repeat itself could show nothing."""
        results = []
        for _ in range(2):
            start = time.monotonic()
            results.append(self._whole(self._empty()))
            self.seconds = time.monotonic() - start
        self.straight = results[0]
        if name := difference(results[0]["weights"], results[1]["weights"]):
            raise SystemExit(f"{self.host}: two equal runs differ, in {name}")

    def train(self, most: int) -> None:
        """One training, killed one to `most` times and resumed to its end."""
        folder = self._empty()
        for _ in range(self.draw.randint(1, most)):
            death = self._death()
            status = ended(child(self.host, folder, self._result(folder), self._log(folder), death), death)
            if status == 0:
                break  # it was over before
            if status != -signal.SIGKILL:
                return self._failed(f"failed by itself ({status}), to be killed at {death}", folder)
            if death.seconds:
                self.found.at_a_moment += 1
            else:
                self.found.at_a_file += 1
        try:
            resumed = self._whole(folder)
        except RuntimeError as error:
            return self._failed(f"{error} after {death}", folder)
        if name := difference(self.straight["weights"], resumed["weights"]):
            return self._failed(f"ended elsewhere, in {name}, after {death}", folder)
        self.found.trainings += 1

    def _death(self) -> Death:
        if self.draw.random() < 0.5:
            return Death(seconds=self.draw.uniform(0.0, self.seconds))
        return Death(operation=self.draw.randint(1, self.straight["operations"]))

    def _whole(self, folder: Path) -> dict[str, Any]:
        result = self._result(folder)
        if (status := ended(child(self.host, folder, result, self._log(folder), None), None)) != 0:
            raise RuntimeError(f"the resumed training failed ({status})")
        return dict(torch.load(result, weights_only=True))

    def _failed(self, why: str, folder: Path) -> None:
        kept = self.folder / f"wrong-{len(self.found.wrong)}"
        shutil.copytree(folder, kept, dirs_exist_ok=True)
        shutil.copyfile(self._log(folder), kept.with_suffix(".log"))
        self.found.wrong.append(f"{why}: see {kept}")

    def _empty(self) -> Path:
        """The same path for every training: it stands in some files."""
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _result(self, folder: Path) -> Path:
        return self.folder / "result.pt"

    def _log(self, folder: Path) -> Path:
        return self.folder / "log.txt"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--most", type=int, default=3, help="kills of one training")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each host")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["ACCEL_CACHE_DIR"] = str(folder / "cache")
    book = folder / "kills.json"
    known = json.loads(book.read_text()) if book.is_file() else {}
    torch.set_num_threads(1)
    html._pictures = lambda *_: ""  # they take longer than the training, and lie in no checkpoint
    for host in given.host:
        found = Found(**known.get(host, {}))
        killing, start = Killing(host, folder, found, given.seed), time.monotonic()
        killing.warm()
        killing.run_straight()
        while found.kills < given.kills and time.monotonic() - start < given.seconds:
            killing.train(given.most)
            known[host] = asdict(found)
            write_atomically(book, lambda file: file.write(json.dumps(known, indent=1).encode()))
        print(
            f"{host}: {found.kills} kills ({found.at_a_moment} at a moment, {found.at_a_file} at a file operation), "
            f"{found.trainings} trainings resumed to the same end, {len(found.wrong)} not; a straight run takes "
            f"{killing.seconds:.1f} s"
        )
        for line in found.wrong:
            print(f"  {line}")
    return 1 if any(one["wrong"] for one in known.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
