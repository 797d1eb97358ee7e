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
from types import FrameType
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
    keys,
    launch,
    model,
    plan,
    status,
    train,
    verify,
)
from corn.cli.options import spread_records
from corn.cli.output import print_error, show_warnings_as_notes
from corn.errors import CornError, StoppedByUserError

PANELS: dict[str, dict[Callable[..., None], str]] = {
    "Choose a network, a mechanism and a budget": {
        compare.compare: "corn compare --graph ring:20 --colluders 0,1,2 --plot noise.png",
        advise.advise: "corn advise --samples 2800 --agents 20 --epsilon 1 --parameters 7850",
        account.account: "corn account --epsilon 10 --delta 1e-5 --steps 5000 --clip 0.1",
        explore.explore: "corn explore --graph ring:12 --out explorer.html --no-open",
    },
    "Simulate": {
        train.train: "corn train --task digits --graph ring:20 --mechanism corn,ldp,none",
        data.data: "corn data list",
    },
    "Run, and use the model": {
        plan.plan: "corn plan --graph er:n=20,p=0.2,seed=1 --epsilon 10 --out plan.corn",
        keys.keys: "corn keys make keys --agent 3",
        launch.launch: "corn launch plan.corn --task breast-cancer --step-size 0.5 --out out/run",
        agent.agent: "corn agent plan.corn --keys keys --task digits --agent 2 --store 10.0.0.1",
        status.status: "corn status out/run",
        model.export: "corn export out/run --to onnx --out model.onnx",
        model.predict: "corn predict out/run patients.csv --out predicted.csv",
    },
    "Check": {
        check.check: "corn check sites.toml --agent lake --data a.csv --keys keys --out lake.json",
        verify.verify: "corn verify plan.corn --agent 3",
        audit.audit: "corn audit plan.corn --view worst --trials 10000",
        model.report: "corn report out/run --keys plan.keys --out report.html",
    },
}
"""Each command with an example, by task in the order of the help."""

COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    function.__name__: (function, example)
    for commands in PANELS.values()
    for function, example in commands.items()
}
"""The same by name."""

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


_FLAG = typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)


@app.callback()
def describe(version: Annotated[bool, _FLAG] = False) -> None:
    """CorN: private decentralised learning with correlated noise that cancels."""


for panel, commands in PANELS.items():
    for function, example in commands.items():
        add = app.command(function.__name__, epilog=f"Example: {example}", rich_help_panel=panel)
        add(spread_records(function))


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
