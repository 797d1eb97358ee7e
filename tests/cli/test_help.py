"""Lists of names in help texts agree with the source.

Commands import the parts that need torch only when they run, so that ``corn --help`` is fast. Some
help texts therefore repeat names from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

import pytest
import typer

from corn.cli import app
from corn.covariance.threat import _SEEDS
from corn.learn.datasets import ModelName
from corn.report.figures import FIGURE_SUFFIXES
from corn.topology.mixing import GossipKind


@pytest.mark.parametrize(
    ("command", "parameter", "names"),
    [
        ("plan", "seeds", ["auto", *_SEEDS]),
        ("plan", "gossip", get_args(GossipKind)),
        ("train", "model", get_args(ModelName)),
        ("compare", "plot", FIGURE_SUFFIXES),
    ],
)
def test_every_choice_is_named(command: str, parameter: str, names: Iterable[str]) -> None:
    # Between these characters a word ends; "corn" must not be found in "corn-paper".
    words = re.split(r"[ ,;:()]+|\.(?= |$)", find_help(command, parameter))
    assert set(names) <= set(words)


def find_help(command: str, parameter: str) -> str:
    commands: Any = typer.main.get_command(app)
    return str(next(one.help for one in commands.commands[command].params if one.name == parameter))
