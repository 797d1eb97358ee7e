"""Imported by the forkserver, so that agents inherit machine code that was loaded once.

It ends with the launcher. A signal to all processes of a run must not end it before, and with it
the agents, which stop together.
"""

from __future__ import annotations

import signal

from corn.noise.fast import find_compiled

signal.signal(signal.SIGTERM, signal.SIG_IGN)
find_compiled()
