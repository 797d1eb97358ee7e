"""Options from a TOML file: ``--config``, which takes every option of its command."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from corn.errors import FileFormatError
from corn.parsing import quote

# Read in bounded size, as any path may be given, a device included.
_MAX_BYTES = 1 << 20
_REQUIRE = "require"


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given: on the command line, in the environment or in a file."""
    # A plan replaces a default silently, but contradicts a choice, so the two must be told apart.
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")


def _take_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of the running command."""
    if path is not None:
        # As defaults, so that the command line and the environment take precedence without further
        # code.
        context.default_map = _read_options(context, path)
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="TOML file with any of these options, such as step-size = 0.1. The command line and "
        "environment variables take precedence.",
        callback=_take_file,
        # Before all others, whose defaults it changes.
        is_eager=True,
    ),
]


def merge_requirements(context: typer.Context, given: list[str] | None) -> list[str] | None:
    """Return the requirements of the command line, and those of the file that it does not name."""
    listed = list(given or ())
    names = {text.partition("=")[0].strip() for text in listed}
    # Without this, one requirement on the command line would drop all those of the file.
    kept = (context.default_map or {}).get(_REQUIRE, ())
    return [*(text for text in kept if text.partition("=")[0] not in names), *listed] or None


def _read_options(context: typer.Context, path: Path) -> dict[str, Any]:
    """Return the options in a file by the names of parameters, as texts of the command line."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise FileFormatError(f"{path}: has more than {_MAX_BYTES:,} bytes")
        document = tomllib.loads(data.decode())
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not TOML: {error}") from error
    # Options by their names on the command line, arguments by their own.
    known = {
        str(max(parameter.opts, key=len)).removeprefix("--"): parameter
        for parameter in context.command.params
        if parameter.name not in ("config_file", "help")
    }
    options: dict[str, Any] = {}
    for name, value in document.items():
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1) or ["step-size"]
            raise FileFormatError(
                f"{path}: unknown option {quote(name)}: names are those of the command line "
                f"without --, such as {close[0]}"
            )
        if name == _REQUIRE and isinstance(value, dict):
            value = [
                f"{key}={_write(own, f'{path}: [{name}] {key}')}" for key, own in value.items()
            ]
        options[str(known[name].name)] = _read_value(context, known[name], value, f"{path}: {name}")
    return options


def _read_value(context: typer.Context, parameter: Any, value: object, place: str) -> object:
    """Return the value of an option as the command line has it, or raise as it would."""
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise FileFormatError(f"{place} must be true or false, found {quote(value)}")
        return value
    is_list = getattr(parameter, "multiple", False)
    if isinstance(value, list) != is_list:
        kind = "a list" if is_list else "one value"
        raise FileFormatError(f"{place} must be {kind}, found {quote(value)}")
    texts = [_write(item, place) for item in (value if isinstance(value, list) else [value])]
    text: object = texts if is_list else texts[0]
    try:
        parameter.process_value(context, text)
    except typer.BadParameter as error:
        raise FileFormatError(f"{place}: {error.message}") from error
    return text


def _write(value: object, place: str) -> str:
    """Return a value of a file as the text of the command line."""
    # True is a number to Python, and would be taken for the text of a path or a name.
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise FileFormatError(f"{place} must be a text or a number, found {quote(value)}")
    return str(value)
