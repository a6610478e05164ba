"""A function run in a copy of this process: what it does to a user's objects is not seen here."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")

TOKENIZERS = "TOKENIZERS_PARALLELISM"
"""Unset, a fork makes the tokenizers' library print a page of advice."""


class ForkFailed(Exception):
    """The copy could not be made, ended early, or took too long; the text says which."""


def in_a_copy(function: Callable[[], T], seconds: float) -> T:
    """What `function()` returns, from a forked process on one thread that prints nothing and has no device.

    Args:
        function: its result, and an exception that it raises, must be picklable.
        seconds: after which the copy is ended.

    Raises:
        ForkFailed: no answer came.
        Exception: what `function` raised.
    """
    if not hasattr(os, "fork"):
        raise ForkFailed("this system cannot copy a process")
    receiving, sending = os.pipe()
    with _quietly():
        child = os.fork()
    if child == 0:
        os.close(receiving)
        _answer(function, sending)
    os.close(sending)
    try:
        answer = _received(receiving, seconds)
    finally:
        os.close(receiving)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # somebody else's handler was first
            os.waitpid(child, 0)
    if not answer:
        raise ForkFailed(f"no answer from a copy of the process within {seconds:g} s")
    found, error = pickle.loads(answer)
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def _answer(function: Callable[[], object], sending: int) -> NoReturn:
    """The child's whole life; nothing of the parent's is flushed, closed or ended by it."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        try:
            answer = pickle.dumps((function(), None))
        except Exception as error:
            answer = pickle.dumps((None, error))
        with os.fdopen(sending, "wb") as file:
            file.write(answer)
    finally:
        os._exit(0)


def _received(receiving: int, seconds: float) -> bytes:
    end = time.monotonic() + seconds
    parts: list[bytes] = []
    while select.select([receiving], [], [], max(end - time.monotonic(), 0))[0]:
        part = os.read(receiving, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


@contextmanager
def _quietly() -> Iterator[None]:
    chosen = TOKENIZERS in os.environ
    if not chosen:
        os.environ[TOKENIZERS] = "false"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the copy has none of them
            yield
    finally:
        if not chosen:
            os.environ.pop(TOKENIZERS, None)
