"""A record that a command takes becomes one option per field."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from corn.cli.options import read_configuration, spread_records


@dataclass(frozen=True)
class Meal:
    dish: Annotated[str, typer.Option(help="What to eat.")]
    portions: Annotated[int, typer.Option(min=1, help="How much.")] = 2


@dataclass(frozen=True)
class LargeMeal(Meal):
    portions: Annotated[int, typer.Option(min=1, help="How much.")] = 5


def serve(context: typer.Context, *, loud: bool = False, meal: LargeMeal) -> None:
    """Serve a meal."""
    typer.echo(f"{loud} {meal} {read_configuration(context)}")


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(spread_records(serve))
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_options_become_the_record() -> None:
    exit_code, printed = run("--portions", "3", "--dish", "soup", "--loud")
    assert exit_code == 0
    assert "True LargeMeal(dish='soup', portions=3)" in printed
    assert "{'loud': True, 'dish': 'soup', 'portions': 3}" in printed


def test_help_includes_the_command_and_its_fields() -> None:
    printed = " ".join(run("--help")[1].split())
    for words in ("Serve a meal.", "What to eat.", "How much.", "default: 5"):
        assert words in printed
