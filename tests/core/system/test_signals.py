from __future__ import annotations

import os
import signal
import threading

import pytest

from plugins.core.system.signals import asked_to_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_the_second_stops(number):
    before = signal.getsignal(number)
    with asked_to_stop() as asked:
        assert not asked.is_set()
        os.kill(os.getpid(), number)
        assert asked.is_set()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_there_are_no_signals():
    seen = []

    def inside():
        with asked_to_stop() as asked:
            seen.append(asked.is_set())

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [False]
