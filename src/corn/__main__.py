"""The ``corn`` command, also as ``python -m corn``."""

import sys


def main() -> None:
    """Load everything and run; Ctrl-C ends without a word, also while things are loaded."""
    try:
        from corn.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
