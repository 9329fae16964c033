"""Signals are remembered, whatever a library does to their handlers meanwhile."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

import pytest

from offramp.common.signals import caught_signals, listen_again


def test_signals_are_remembered_and_handlers_put_back() -> None:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with caught_signals() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM, signal.SIGTERM]
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), caught_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_library_that_took_the_signals_has_to_give_them_back() -> None:
    """As a compiler inside the process does, behind Python's back."""
    with caught_signals() as caught:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(signal.SIG_IGN))
        os.kill(os.getpid(), signal.SIGTERM)
        assert not caught
        listen_again()
        os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]


def test_nobody_listens_outside_and_in_other_threads() -> None:
    before = signal.getsignal(signal.SIGTERM)
    listen_again()
    assert signal.getsignal(signal.SIGTERM) is before
    with caught_signals():
        thread = threading.Thread(target=listen_again)
        thread.start()
        thread.join()
