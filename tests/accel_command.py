"""The `accel` command in this process, for the tests of its parts."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from plugins import cli


def accel_command(
    monkeypatch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str], *before: str, columns: int = 200
) -> Callable[..., tuple[int, str, str]]:
    """A function of the words after `accel` and `before`: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", str(columns))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["accel", *before, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *output.readouterr()

    return run
