"""A secret is shown only by ``reveal``."""

import copy
import dataclasses
import json
import logging
import pickle
import traceback
from typing import Any

import pytest

from corn.errors import InvalidArgumentError
from corn.noise import Secret, generate_identity

from ..leaks import shows

VALUE = bytes(range(100, 132))
SECRET = Secret(VALUE)


def test_text_forms_do_not_show_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("corn").warning("key %s %r", SECRET, SECRET)
    shown = f"{SECRET} {SECRET!r} {SECRET!s} {[SECRET]}" + caplog.text
    assert not shows(SECRET, shown)
    assert shows(SECRET, f"key {VALUE!r}")
    assert not hasattr(SECRET, "__dict__")


@pytest.mark.parametrize("holder", [SECRET, generate_identity(), [SECRET], {"key": SECRET}])
def test_pickling_and_copying_are_refused(holder: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError):
            pickle.dumps(holder, protocol)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.deepcopy(holder)
    with pytest.raises(TypeError):
        json.dumps(holder)


def test_a_record_that_holds_a_secret_cannot_be_turned_into_a_dict() -> None:
    record = dataclasses.make_dataclass("Record", ["key"])(SECRET)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        dataclasses.asdict(record)
    assert VALUE.hex() not in repr(record)


def test_secrets_compare_but_do_not_hash() -> None:
    assert Secret(VALUE) == SECRET
    assert Secret(bytes(32)) != SECRET
    assert SECRET != VALUE
    with pytest.raises(TypeError, match="unhashable"):
        hash(SECRET)
    assert Secret.random() != Secret.random()


@pytest.mark.parametrize("value", [VALUE[:31], VALUE + b"x", "secret words as text, 32 letters", 7])
def test_a_wrong_length_is_refused_without_showing_the_value(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="a secret must be 32 bytes") as caught:
        Secret(value)
    assert str(value) not in str(caught.value)
    assert repr(value) not in "".join(traceback.format_exception_only(caught.value))
