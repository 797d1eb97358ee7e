"""Conventions of all commands: help, --json, exit codes, one-line errors."""

import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from corn import __version__
from corn.cli import COMMANDS, app, run_command
from corn.learn.sweep import SweepLoop

from .commands import Runner


def options_of(name: str) -> list[Any]:
    commands: Any = typer.main.get_command(app)
    return list(commands.commands[name].params)


def test_version(corn: Runner) -> None:
    outcome = corn("--version")
    assert (outcome.exit_code, outcome.stdout) == (0, f"corn {__version__}\n")


def test_help_fits_a_screen(corn: Runner) -> None:
    assert len(corn("--help").stdout.splitlines()) <= 48


def test_help_lists_every_command_with_a_line_and_an_example(corn: Runner) -> None:
    text = " ".join(corn("--help").stdout.split())
    for name, (function, example) in COMMANDS.items():
        summary = (function.__doc__ or "").splitlines()[0]
        assert summary.split()[0] in text
        assert name in text
        assert example in " ".join(corn(name, "--help").stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_offers_json(name: str) -> None:
    assert "--json" in {flag for option in options_of(name) for flag in option.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_of_noun_phrases_or_sentences(name: str) -> None:
    for option in options_of(name):
        text = getattr(option, "help", None) or ""
        assert text.endswith((".", ".)", "…")), (option.name, text)
        # Help texts are marked up: a word in brackets would be taken for a style, and not shown.
        assert not re.search(r"(?<!\\)\[[a-z/]", text), (option.name, text)
        first = text.split()[0]
        assert first not in ("What", "How", "Who", "Whose", "Where", "Why", "Which"), option.name


def test_module_and_script_are_the_same_command() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "corn", "compare", "--graph", "nonsense"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert process.stderr.startswith("corn: unknown graph 'nonsense'")
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    ["nonsense", "compare", "compare --graph ring:5 --wrong", "train --graph ring:5 --runs 0"],
)
def test_misuse_exits_with_2(corn: Runner, arguments: str) -> None:
    outcome = corn(*shlex.split(arguments))
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --graph missing.edges", "missing.edges: no such file"),
        (
            "compare --graph ring:5 --plot picture.txt",
            "picture.txt: a figure's name must end in .png",
        ),
        ("compare --graph ring:200001", "a graph can have at most 200,000 agents"),
    ],
)
def test_expected_failures_exit_with_1_and_one_line(
    corn: Runner, arguments: str, message: str
) -> None:
    outcome = corn(*shlex.split(arguments))
    assert outcome.exit_code == 1
    assert outcome.stdout == ""
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_escape_codes_in_names_are_printed_as_text(corn: Runner, tmp_path: Path) -> None:
    """Terminal codes, table markup and figure mathematics have no effect."""
    path = tmp_path / "[bold]\x1b[2Jg.edges"
    name = "$\\frac[2J$"
    path.write_text(f"{name} [/red]\n")
    figure = tmp_path / "g.png"
    outcome = corn("compare", "--graph", path, "--plot", figure)
    assert outcome.exit_code == 0
    assert "\x1b" not in outcome.stdout + outcome.stderr
    assert "[bold]\\x1b[2Jg.edges" in "".join(outcome.stdout.split())
    assert figure.exists()
    path.write_text(f"{name} \x1b[2J\n")
    outcome = corn("compare", "--graph", path)
    assert outcome.exit_code == 1
    assert outcome.stderr.rstrip("\n").isprintable()


def test_outputs_replace_no_inputs(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("g.edges", "model.pt", "rows.csv", "sites.toml"):
        Path(name).write_text("0 1\n")
    for command in (
        "plan --graph g.edges --out g.edges",
        "plan sites.toml --out ./sites.toml",
        "export model.pt --out model.pt",
        "predict model.pt rows.csv --out rows.csv",
        f"check sites.toml --agent 0 --data rows.csv --keys keys --out {tmp_path / 'rows.csv'}",
    ):
        outcome = corn(*command.split())
        assert outcome.exit_code == 2, command
        assert "which is also read" in " ".join(outcome.stderr.split()), command
    assert all(path.read_text() == "0 1\n" for path in tmp_path.iterdir())


def test_unwritable_output_is_one_line(corn: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = corn("compare", "--graph", "ring:5", "--plot", f"{tmp_path}/file/g.png")
    assert outcome.exit_code == 1
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize("usual", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_is_handled_like_ctrl_c(
    usual: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Also where Ctrl-C is ignored, as in the background of a script."""
    for number in (signal.SIGTERM, signal.SIGINT):
        request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(signal.SIGINT, usual)

    def work(prog_name: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        pytest.fail(f"{prog_name} was not interrupted")

    monkeypatch.setattr("corn.cli.app", work)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="130"):
        run_command()
    assert signal.getsignal(signal.SIGTERM) == before


def test_forked_workers_end_at_sigterm_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(prog_name: str) -> None:
        context = multiprocessing.get_context("fork")
        running = context.Event()

        def linger() -> None:
            running.set()
            time.sleep(60)

        worker = context.Process(target=linger)
        worker.start()
        assert running.wait(30), prog_name
        worker.terminate()
        worker.join(30)
        assert worker.exitcode == 128 + signal.SIGTERM, prog_name

    monkeypatch.setattr("corn.cli.app", work)
    with pytest.raises(SystemExit):
        run_command()


@pytest.mark.parametrize("module", ["numpy.version", "typer"])
def test_ctrl_c_during_imports_ends_with_one_line(module: str) -> None:
    # With this option Python names each module on stderr as soon as it is imported.
    command = [sys.executable, "-X", "importtime", "-m", "corn", "compare", "--graph", "ring:8"]
    pipe = subprocess.PIPE

    def listen() -> None:
        # A shell that runs the tests in the background makes all their processes ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=listen,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        while module not in (line := process.stderr.readline()):
            assert line, f"{module} is not imported"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read().splitlines()
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert [line for line in rest if not line.startswith("import time:")] == [
        "corn: interrupted; nothing was written"
    ]


def test_ctrl_c_ends_commands_with_130_and_one_line(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line states what was kept."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("corn.cli.plan.make_plan", interrupt)
    outcome = corn("plan", "--graph", "ring:4", "--out", tmp_path / "plan.corn")
    assert (outcome.exit_code, outcome.stdout) == (130, "")
    assert outcome.stderr == "corn: interrupted; nothing was written\n"

    def interrupt_soon(self: SweepLoop) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        advance(self)

    advance = SweepLoop.advance
    monkeypatch.setattr(SweepLoop, "advance", interrupt_soon)
    arguments = ("--task", "quadratic", "--graph", "ring:4", "--steps", 9, "--out", tmp_path)
    outcome = corn("train", *arguments)
    assert outcome.exit_code == 130
    assert "interrupted after step 1" in outcome.stderr
    assert (tmp_path / "run.json").exists()
