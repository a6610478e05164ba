"""A host's own tests run twice, alone and with the plug, and compared; what the scripts of this folder share."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WITH_PLUG = "PEERS_WITH_PLUG"


@dataclass(frozen=True)
class Suite:
    """The tests of one host.

    Attributes:
        package: its distribution.
        plugin: the script, which is also the pytest plugin that puts the plug in.
        paths: what pytest is given.
        root: the folder that pytest runs in.
        offline: variables of its environment.
        allowed: tests that may differ, as patterns of their names, and why.
        prepare: puts what a run downloads into the folder it is given; returns variables of the environment.
    """

    package: str
    plugin: Path
    paths: Sequence[Path]
    root: Path
    offline: Mapping[str, str]
    allowed: Mapping[str, str]
    prepare: Callable[[Path], dict[str, str]] = lambda scratch: {}

    def compare(self, arguments: list[str]) -> int:
        """Print what differs; 1 where a test passes alone and not with the plug, and is not allowed to."""
        alone, plugged = (self.run(plug, arguments) for plug in (False, True))
        passed = [name for name, found in alone.items() if found == "passed"]
        differing = {name: plugged.get(name, "missing") for name in passed if plugged.get(name) != "passed"}
        bad = [name for name in differing if not self.reason(name)]
        for name, found in differing.items():
            print(f"{found:8} {name}" + (f"  (allowed: {self.reason(name)})" if self.reason(name) else ""))
        tried = f"{self.package} {importlib.metadata.version(self.package)}: {len(passed)} of {len(alone)} tests"
        print(f"{tried} pass alone; with the plug {len(bad)} of them fail")
        return 1 if bad or not passed else 0

    def run(self, plug: bool, arguments: list[str]) -> dict[str, str]:
        """Outcomes by the test's name: passed, failed, error or skipped.

        Raises:
            SystemExit: pytest could not run at all.
        """
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch) / "outcomes.xml"
            prepared = self.prepare(Path(scratch))
            environment = {**os.environ, **self.offline, **prepared, "ACCEL_CACHE_DIR": scratch}
            environment["PYTHONPATH"] = _before(self.plugin.parent, "PYTHONPATH")
            environment["PATH"] = _before(Path(sys.executable).parent, "PATH")
            if plug:
                environment[WITH_PLUG] = "1"
            command = [sys.executable, "-m", "pytest", "-q", "-p", self.plugin.stem, "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, f"--junitxml={log}", *map(str, self.paths), *arguments],
                cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if not log.is_file():
                sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
            cases = ElementTree.parse(log).getroot().iter("testcase")
            return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}

    def reason(self, name: str) -> str:
        """Why a test may differ; empty where it may not."""
        return next((why for pattern, why in self.allowed.items() if fnmatch.fnmatch(name, pattern)), "")


def _before(folder: Path, variable: str) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get(variable)])])


def outcome(case: ElementTree.Element) -> str:
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
