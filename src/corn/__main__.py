"""The ``corn`` command, also as ``python -m corn``."""

import os
import signal

_STDERR = 2


def main() -> None:
    """Import the command line and run it; Ctrl-C ends both with one line and exit code 130."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.SIG_IGN:  # where it is ignored, as in a background job, it stays so
        signal.signal(signal.SIGINT, _exit_at_once)
    from corn.cli import run_command

    signal.signal(signal.SIGINT, usual)
    run_command()


def _exit_at_once(number: int, _frame: object) -> None:
    # Not by KeyboardInterrupt: an extension module that is interrupted in the middle of its import
    # prints a traceback of its own, or turns the exception into an ImportError. Nothing has been
    # opened yet, so there is nothing to clean up. Written without Python's buffers, in which a
    # signal handler may not write while the interrupted code does.
    os.write(_STDERR, b"corn: interrupted; nothing was written\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
