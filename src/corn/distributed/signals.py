"""Signals to an agent, heard by a thread: the main one may wait inside torch, where Python is deaf.

A wait for a neighbour that says nothing lasts until the time-out. Python's own handlers run when
it is over; the number of a signal is written to a pipe at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from corn.learn.monitor import Interruption

_HEARD = (signal.SIGINT, signal.SIGTERM)
_SECONDS_OF_ONE_REQUEST = 1.0
_SECONDS_TO_SAY = 0.2


def listen_for_signals() -> Interruption:
    """The first signal asks to stop together with the others, a second one ends this process.

    Ending at once loses nothing: an agent may be killed at any time. What follows the first within
    a second is the same request, by the process group and by torchrun, say. To be called once, from
    the main thread.
    """
    interruption = Interruption()
    for number in _HEARD:
        signal.signal(number, lambda *_: None)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader, interruption), daemon=True).start()
    return interruption


def _listen(reader: int, interruption: Interruption) -> None:
    began = 0.0
    while True:
        number = os.read(reader, 1)[0]
        if number not in _HEARD:
            continue
        if not interruption.requested:
            interruption.requested, began = True, time.monotonic()
            _say("corn: stops with the others after a few more steps; a second signal ends it")
        elif time.monotonic() > began + _SECONDS_OF_ONE_REQUEST:
            _say("corn: ended by a second signal")
            os._exit(128 + number)


def _say(text: str) -> None:
    """Nobody may read it any more, which must not stop the listener."""

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(_SECONDS_TO_SAY)
