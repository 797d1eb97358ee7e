"""The ``corn`` command: each command parses its options, calls the library and prints.

Exit codes: 0 done; 1 an expected failure, with one line; 2 an invalid command line; 130 ended by
Ctrl-C or SIGTERM, with one line that states what was kept.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Annotated

import typer

import corn
from corn.cli import (
    account,
    advise,
    agent,
    audit,
    check,
    compare,
    data,
    explore,
    export,
    keys,
    launch,
    plan,
    predict,
    report,
    status,
    train,
    verify,
)
from corn.cli.options import spread_records
from corn.cli.output import print_error, show_warnings_as_notes
from corn.errors import CornError, StoppedByUserError

PANELS: dict[str, tuple[ModuleType, ...]] = {
    "Choose a network, a mechanism and a budget": (compare, advise, account, explore),
    "Simulate": (train, data),
    "Run, and use the model": (plan, keys, launch, agent, status, export, predict),
    "Check": (check, verify, audit, report),
}
"""The module of each command, by task in the order of the help."""

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    name: (getattr(module, name), module.EXAMPLE)
    for modules in PANELS.values()
    for module in modules
    for name in [module.__name__.rpartition(".")[2]]
}
"""Each command, and an example of its use."""

# 128 + SIGINT, as shells report it.
INTERRUPTED = 130

app = typer.Typer(
    name="corn",
    no_args_is_help=True,
    add_completion=False,
    # Rich tracebacks may print local variables, which hold data and keys.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="corn COMMAND --help has the options of a command and an example.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"corn {corn.__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """CorN: private decentralised learning with correlated noise that cancels."""


for panel, modules in PANELS.items():
    for module in modules:
        function, example = COMMANDS[module.__name__.rpartition(".")[2]]
        app.command(function.__name__, epilog=f"Example: {example}", rich_help_panel=panel)(
            spread_records(function)
        )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, even if SIGINT is ignored, as in a background job.

    Forked worker processes inherit the handler, but end at SIGTERM as usual.
    """
    own = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A worker that handled it like Ctrl-C would print the command's last line again.
        if os.getpid() != own:
            os._exit(128 + number)
        handler = signal.getsignal(signal.SIGINT)
        # The current handler: some commands catch the first Ctrl-C to stop in an orderly way.
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_command(command: Callable[..., object] | None = None, *, name: str = "corn") -> None:
    """Run a Typer app, by default ``corn``; expected failures become one line and exit code 1.

    SIGTERM, which containers and schedulers send, is handled like Ctrl-C.
    """
    try:
        show_warnings_as_notes()
        with _sigterm_as_ctrl_c():
            (command or app)(prog_name=name)
    # Before CorN's other errors, as it is one of them, and has an exit code of its own.
    except StoppedByUserError as error:
        print_error(str(error))
        sys.exit(INTERRUPTED)
    except (KeyboardInterrupt, SystemExit) as end:
        # Typer turns a KeyboardInterrupt into an exit of its own.
        code = end.code if isinstance(end, SystemExit) else INTERRUPTED
        if code == INTERRUPTED:
            print_error("interrupted; nothing was written")
        sys.exit(code)
    except CornError as error:
        print_error(str(error))
    # A dense matrix of n × n numbers is what usually does not fit.
    except MemoryError:
        print_error("not enough memory for a network of this size; try fewer agents")
    except OSError as error:
        print_error(f"{error.filename or 'file'}: {error.strerror or error}")
    sys.exit(1)
