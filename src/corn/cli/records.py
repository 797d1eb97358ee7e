"""Records of options: a command takes a dataclass, which has one field per option."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

import typer

from corn.errors import InfeasibleError, InvalidArgumentError

# Arguments of the library whose options have other names.
_OTHER_NAMES = {"num_steps": "steps", "max_colluders": "colluders", "length": "horizon"}


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
        names = list(given)
        try:
            for name, record in records.items():
                own = {field.name: given.pop(field.name) for field in fields(record)}
                given[name] = record(**own)
            command(**given)
        except (InvalidArgumentError, InfeasibleError) as error:
            is_invalid = isinstance(error, InvalidArgumentError)
            kind = InvalidArgumentError if is_invalid else InfeasibleError
            # Users know the options of a command, not the arguments of the library.
            raise kind(name_options(str(error), names)) from error

    spread = [
        option
        for p in parameters
        for option in (_options(p.annotation) if p.name in records else [_by_name(p)])
    ]
    # Typer reads options from the signature.
    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    return call


def name_options(message: str, names: Iterable[str]) -> str:
    """Return an error of the library with the options of a command instead of arguments.

    >>> name_options("batch_size must be None for unit='agent', found 3", ["batch_size", "unit"])
    '--batch-size must be left out for --unit agent, found 3'
    >>> name_options("seed=1 is not that of er:n=9,p=0.5,seed=2", ["seed"])
    '--seed 1 is not that of er:n=9,p=0.5,seed=2'
    """
    known = set(names)
    arguments = known | {theirs for theirs, ours in _OTHER_NAMES.items() if ours in known}
    for name in sorted(arguments, key=len, reverse=True):
        option = "--" + _OTHER_NAMES.get(name, name).replace("_", "-")
        # Single words such as unit and clip are also words of plain English, so they are replaced
        # only where they are used as names of arguments, and not in a spec such as er:n=9,seed=1.
        message = re.sub(
            rf"(?<![\w,:-]){name}='?([\w.:+-]+?)'?(?=[\s,;:)]|\.?$)", rf"{option} \1", message
        )
        message = re.sub(rf"(^|[:;] ){name}(?= must )", rf"\1{option}", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}(?!\w)", option, message)
    return message.replace(" must be None", " must be left out").replace(", found None", "")


def read_configuration(context: typer.Context) -> dict[str, object]:
    """Return the value of every option of the running command, in the order of its help."""
    names = [parameter.name for parameter in context.command.params]
    return {name: context.params[name] for name in names if name in context.params}


def _options(record: type) -> Iterator[Parameter]:
    types = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
        )


def _by_name(parameter: Parameter) -> Parameter:
    return parameter.replace(kind=Parameter.KEYWORD_ONLY)
