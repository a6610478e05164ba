"""Whether the compilers that inductor needs are here, and answer: found before the first step, not in it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import config as inductor_config

from plugins.core.compile import first_line

ANSWER_SECONDS = 10.0  # to say a version in


def missing_compiler(device: torch.device, backend: str | Callable[..., Any]) -> str:
    """Why inductor cannot work here, or an empty string."""
    if backend != "inductor":
        return ""
    try:
        if device.type == "cpu":
            from torch._inductor.cpp_builder import get_cpp_compiler

            if silent := _silent_compiler():
                return f"the C++ compiler {silent} did not say its version within {ANSWER_SECONDS:.0f} s"
            get_cpp_compiler()
        elif device.type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                return "no working Triton found"
    except Exception as error:
        return f"no C++ compiler found: {first_line(error)}"
    return ""


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started; it was given a session of its own."""
    if process.poll() is None:
        with contextlib.suppress(OSError, AttributeError):  # no process groups on Windows
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _silent_compiler() -> str:
    """The C++ compiler that does not answer, or empty. torch asks without a limit, and would hang the run."""
    wanted = inductor_config.cpp.cxx
    for name in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
        if name is None:  # torch's word for one that it would install
            continue
        with contextlib.suppress(OSError, ValueError):  # none of that name: torch finds that out as well
            quiet = subprocess.DEVNULL
            command = [*shlex.split(name), "--version"]
            process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
            try:
                process.wait(ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                return str(name)
            finally:
                end_group(process)
    return ""
