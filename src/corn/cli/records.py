"""Records of options: a command takes a dataclass, which has one field per option."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

import typer


def spread_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with a signature for typer, in which fields replace their records.

    Typer accepts single options only. Without records, each command with a privacy budget would
    repeat all options of a budget and their defaults.
    """
    # Annotations are text where a module postpones them; typer needs the types themselves.
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    records = {
        p.name: p.annotation
        for p in parameters
        if isinstance(p.annotation, type) and is_dataclass(p.annotation)
    }

    @wraps(command)
    def call(**given: Any) -> None:
        for name, record in records.items():
            own = {field.name: given.pop(field.name) for field in fields(record)}
            given[name] = record(**own)
        command(**given)

    spread = [
        option
        for p in parameters
        for option in (_options(p.annotation) if p.name in records else [_by_name(p)])
    ]
    # Typer reads options from the signature.
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return call


def read_configuration(context: typer.Context) -> dict[str, object]:
    """Return the value of every option of the running command, in the order of its help."""
    names = [parameter.name for parameter in context.command.params]
    return {name: context.params[name] for name in names if name in context.params}


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line or in the environment."""
    # A plan replaces a default silently, but contradicts a choice, so the two must be told apart.
    source = context.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT")


def _options(record: type) -> Iterator[Parameter]:
    types = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


def _by_name(parameter: Parameter) -> Parameter:
    return parameter.replace(kind=Parameter.KEYWORD_ONLY)
