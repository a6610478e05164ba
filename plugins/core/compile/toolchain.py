"""The compilers that inductor needs: whether they are here and answer, and an end to those that hang."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch._inductor import config as inductor_config

from plugins.core.compile.compiled_module import first_line
from plugins.core.system import devices

ANSWER_SECONDS = 10.0  # to say a version in
AGAIN_SECONDS = 5.0  # after a limit that was reached where Python drops exceptions, such as in a finaliser


class OutOfTime(BaseException):
    """What `time_limit` raises. No Exception: the compiler would take that for a failure of its own."""


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
        elif device.type not in devices.INDUCTOR:
            return f"inductor writes no code for {device.type}"
        elif device.type in devices.TRITON:
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


def may_limit() -> bool:
    """Whether `time_limit` works here: in the main thread, where no other timer is set, of which a process has one."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "getitimer"):
        return False
    return not any(signal.getitimer(signal.ITIMER_REAL))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime inside after so many seconds, and end the processes that were started inside.

    Without a limit where `may_limit` says no.
    """
    if not may_limit():
        yield
        return
    own = psutil.Process()
    before = set(own.children(recursive=True))

    def end_new() -> None:
        for child in set(own.children(recursive=True)) - before:
            with contextlib.suppress(psutil.Error):
                child.kill()

    until = time.monotonic() + seconds

    def stop(number: int, frame: Any) -> None:
        left = until - time.monotonic()
        if left > 0.01:  # another thread's alarm, which took the one timer
            signal.setitimer(signal.ITIMER_REAL, left, AGAIN_SECONDS)
            if callable(previous):
                previous(number, frame)
            return
        end_new()  # before their parents forget them
        raise OutOfTime(f"given up: it outlived its budget of {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    except OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, 0)
        end_new()  # what the compiler's threads started since
        # here: fifty modules of the compiler, which a run that compiles nothing has no use for
        from torch._inductor.async_compile import shutdown_compile_workers

        shutdown_compile_workers()  # those of torch too: a pool that lost a process would fail the next compile
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous or signal.SIG_DFL)


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
