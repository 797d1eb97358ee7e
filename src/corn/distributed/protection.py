"""Protection of an agent's keys: modes of their files, no core dumps, no access to its memory.

Keys are in the memory of the agent's process. A core dump would write them to a disk, and any
process of the same user could read them through ptrace or ``/proc``.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

from corn.files import require_private

_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15
# The kernel keeps 15 bytes and a zero.
_MOST_NAME_BYTES = 15


def protect_process(name: str) -> None:
    """Name this process for ``ps`` and ``top``, and keep its memory from others.

    Root can still read the memory. On systems other than Linux only core dumps are disabled.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        call = ctypes.CDLL(None, use_errno=True).prctl
        # ``ps -o comm`` and ``top`` show this name; ``ps -f`` shows the command line, which stays.
        call(_PR_SET_NAME, name.encode()[:_MOST_NAME_BYTES])
        # Files in /proc of this process belong to root from now on. Its state in /proc/PID/stat can
        # still be read by all, which is how the launcher finds suspended agents.
        call(_PR_SET_DUMPABLE, 0)


def require_private_keys(folder: Path, agent: int) -> None:
    """Raise unless only the owner can use the folder of keys, and the agent's key and ledgers.

    A ledger contains the nonces of runs, and nonces and keys together reproduce the noise.
    """
    require_private(folder)
    for path in (folder / f"agent-{agent}.key", *folder.glob(f"agent-{agent}-*.ledger")):
        require_private(path)
