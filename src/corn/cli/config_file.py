"""Options from a TOML file: ``--config``, which takes every option of its command."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from corn.errors import FileFormatError, make_printable
from corn.parsing import quote

_MAX_BYTES = 1 << 20
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "integer": ((int,), "a whole number"),
    "integer range": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "float range": ((int, float), "a number"),
}
_TEXT: tuple[tuple[type, ...], str] = (str,), "text in quotation marks"


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given: on the command line, in the environment or in a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")


def _take_file(context: typer.Context, path: Path | None) -> Path | None:
    """Let the options in a file be defaults of the running command."""
    if path is not None:
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


def _read_options(context: typer.Context, path: Path) -> dict[str, Any]:
    """Return the options in a file by the names of parameters, each of the right type."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode()
        document = tomllib.loads(text if len(text) <= _MAX_BYTES else "")
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path}: not TOML: {error}") from error
    known = {_name_of(parameter): parameter for parameter in context.command.params}
    options: dict[str, Any] = {}
    for name, value in document.items():
        parameter = known.get(name)
        if parameter is None or name in ("config", "help"):
            raise FileFormatError(
                f"{path}: unknown option {quote(name)}: names are those of the command line "
                f"without --, such as {_suggest(name, known)}"
            )
        options[str(parameter.name)] = _convert(context, parameter, value, f"{path}: {name}")
    return options


def _name_of(parameter: Any) -> str:
    """Return the option as it is written in a file; an argument has its own name."""
    longest = max(parameter.opts, key=len)
    return str(longest).removeprefix("--")


def _suggest(name: str, known: dict[str, Any]) -> str:
    close: list[str] = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else "step-size"


def _convert(context: typer.Context, parameter: Any, value: object, place: str) -> object:
    """Return a value as the command line would give it; a wrong type or range is one line."""
    # The command line has only text, which it converts. A file has types, and a number in quotation
    # marks is more likely a mistake.
    is_list = parameter.multiple
    items = value if is_list and isinstance(value, list) else [value]
    types, kind = _KINDS.get(parameter.type.name, _TEXT)
    fits = all(isinstance(item, types) and _is_bool(item) == (bool in types) for item in items)
    if not fits or isinstance(value, list) != is_list:
        kind = f"a list of {kind}" if is_list else kind
        raise FileFormatError(f"{place} must be {kind}, found {quote(value)}")
    try:
        parameter.type_cast_value(context, value)
    except typer.BadParameter as error:
        raise FileFormatError(f"{place}: {make_printable(error.format_message())}") from error
    return value


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)
