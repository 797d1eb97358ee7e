"""``python -m corn`` is the ``corn`` command."""

from corn.cli import main

main()
