"""Options from a TOML file: ``--config``, which takes every option of its command."""

from __future__ import annotations

import difflib
import inspect
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from corn.errors import FileFormatError
from corn.parsing import quote

# Read in bounded size, as any path may be given, a device included.
_MAX_BYTES = 1 << 20
_REQUIRE = "require"
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str, int, float), "text in quotation marks, or a number"),
    Path: ((str,), "text in quotation marks"),
}


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


def _write_requirement(name: str, value: object, path: Path) -> str:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise FileFormatError(
            f"{path}: [{_REQUIRE}] {name} must be a text or a number, found {quote(value)}"
        )
    return f"{name}={value}"


def _read_options(context: typer.Context, path: Path) -> dict[str, Any]:
    """Return the options in a file by the names of parameters, each of the right type."""
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
        str(max(parameter.opts, key=len)).removeprefix("--"): str(parameter.name)
        for parameter in context.command.params
        if parameter.name not in ("config_file", "help")
    }
    # The annotations have the types and ranges that the command line enforces, so a file gets the
    # same checks.
    declared = inspect.signature(context.command.callback or _take_file, eval_str=True).parameters
    options: dict[str, Any] = {}
    for name, value in document.items():
        if name == _REQUIRE and isinstance(value, dict):
            value = [_write_requirement(key, own, path) for key, own in value.items()]
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1) or ["step-size"]
            raise FileFormatError(
                f"{path}: unknown option {quote(name)}: names are those of the command line "
                f"without --, such as {close[0]}"
            )
        options[known[name]] = _read_value(
            declared[known[name]].annotation, value, f"{path}: {name}"
        )
    return options


def _read_value(annotation: Any, value: object, place: str) -> object:
    """Return the value of an option if it has the declared type and is in its range."""
    # The command line has only text, which it converts. A file has types, and a number in quotation
    # marks is more likely a mistake.
    declared, *details = get_args(annotation)
    # TOML has no null: an option without a value is left out of the file.
    if type(None) in get_args(declared):
        declared = next(part for part in get_args(declared) if part is not type(None))
    is_list = get_origin(declared) is list
    if is_list:
        (declared,) = get_args(declared)
    choices = get_args(declared) if get_origin(declared) is Literal else ()
    types, kind = _KINDS[Path if choices else declared]
    items = value if is_list and isinstance(value, list) else [value]
    # True is also a whole number to Python.
    fits = all(
        isinstance(item, types) and isinstance(item, bool) == (declared is bool) for item in items
    )
    if not fits or isinstance(value, list) != is_list:
        kind = f"a list of {kind}" if is_list else kind
        raise FileFormatError(f"{place} must be {kind}, found {quote(value)}")
    if choices and value not in choices:
        raise FileFormatError(
            f"{place} must be one of {', '.join(map(str, choices))}, found {quote(value)}"
        )
    for detail in details:
        _check_range(detail, value, place)
    # Such as epsilon, which may be one number, or a text with several.
    return str(value) if declared is str and not is_list else value


def _check_range(detail: Any, value: Any, place: str) -> None:
    least, most = getattr(detail, "min", None), getattr(detail, "max", None)
    if least is not None and value < least:
        raise FileFormatError(f"{place} must be at least {least:g}, found {value}")
    if most is not None and value > most:
        raise FileFormatError(f"{place} must be at most {most:g}, found {value}")
