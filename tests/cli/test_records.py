"""A record that a command takes becomes one option per field."""

from dataclasses import dataclass

import typer
from typer.testing import CliRunner

from corn.cli.options import REQUIRED, option, read_configuration, spread_records


@dataclass(frozen=True)
class Meal:
    dish: str = option("What to eat.", default=REQUIRED)
    portions: int = option("How much.", default=2, min=1)


@dataclass(frozen=True)
class LargeMeal(Meal):
    portions: int = option("How much.", default=5, min=1)


def serve(
    context: typer.Context, *, loud: bool = option("Loud.", default=False), meal: LargeMeal
) -> None:
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
