"""Signals to an agent, heard by a thread: the main one may wait inside torch, where Python is deaf.

A wait for a neighbour that says nothing lasts until the time-out. Python's own handlers run when
it is over; the number of a signal is written to a pipe at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from corn.learn.monitor import Interruption

_HEARD = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODE = 130


def listen_for_signals() -> Interruption:
    """The first signal asks to stop together with the others, the second ends this process.

    To be called once, from the main thread. Ending at once loses nothing that was promised to be
    kept: an agent may be killed at any time.
    """
    interruption = Interruption()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _HEARD:
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_listen, args=(reader, interruption), daemon=True).start()
    return interruption


def _listen(reader: int, interruption: Interruption) -> None:
    while True:
        if os.read(reader, 1)[0] not in _HEARD:
            continue
        if interruption.requested:
            _say("corn: ended by a second signal")
            os._exit(_EXIT_CODE)
        interruption.requested = True
        _say("corn: a signal: stops with the others after a few more steps; a second one ends it")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
