"""Imported by the forkserver, so that agents inherit machine code that was loaded once."""

from __future__ import annotations

from corn.noise import load_compiled

load_compiled()
