"""Text from others is parsed strictly, and printed without control characters."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corn.checks import FloatArray
from corn.errors import CornError, InvalidArgumentError, make_printable
from corn.parsing import build, parse_json


@dataclass(frozen=True)
class Sample:
    count: int
    share: float | None
    kind: Literal["a", "b"]
    pair: tuple[int, str]
    matrix: FloatArray


FIELDS = {"count": 1, "share": 0.5, "kind": "a", "pair": [1, "x"], "matrix": [[1, 2.5]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not text in UTF-8"),
        (b"[" * 21 + b"]" * 21, "nested more than 20 deep"),
        (b'{"a":' * 100_000, "nested more than 20 deep"),
        (b'[{"a": 1, "b": 2, "a": 1}]', "the key 'a' occurs twice"),
        (b"[NaN]", "'NaN' is not a finite number"),
        (b"[1e999]", "'1e999' is not a finite number"),
        (b"-" + b"1" * 5000, "more than 20 digits"),
        (b'{"\\ud800": 1}', "is not Unicode text"),
        (b'["\x1b"]', "not JSON"),
        (b"[1, 2" + b" " * (1 << 20), "more than 1,048,576 bytes"),
    ],
)
def test_errors_state_the_defect_of_json(text: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_json(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 100


def test_valid_json_is_parsed() -> None:
    assert parse_json('\ufeff[-1, 2.5, 1e300, "ε", null]'.encode()) == [-1, 2.5, 1e300, "ε", None]
    assert parse_json(b"[" * 20 + b"]" * 20) is not None
    assert parse_json(b"18446744073709551615") == 2**64 - 1


def test_records_are_built_by_their_declared_types() -> None:
    made = build(Sample, FIELDS, "sample")
    assert made.pair == (1, "x")
    np.testing.assert_array_equal(made.matrix, [[1.0, 2.5]])
    assert build(Sample, {**FIELDS, "share": None}, "sample").share is None
    assert build(float, 1, "x") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": True}, "count cannot be True"),
        ({"count": 1.0}, "count cannot be 1.0"),
        ({"share": False}, "share cannot be False"),
        ({"kind": "c"}, "kind cannot be 'c'"),
        ({"pair": [1]}, "pair cannot be [1]"),
        ({"pair": {"1": "x"}}, "pair cannot be"),
        ({"matrix": [[1], [2, 3]]}, "matrix has rows of different lengths"),
        ({"matrix": [["1"]]}, "matrix must be numbers"),
        ({"matrix": [2**64]}, "matrix must be numbers"),
        ({"other": 1}, "sample: unknown entry 'other'"),
        ({"count": "x" * 10**6}, "xxx...xxx"),
    ],
)
def test_other_types_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        build(Sample, {**FIELDS, **changes}, "sample")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 120


def test_missing_fields_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="sample: 'count' is missing"):
        build(Sample, {name: value for name, value in FIELDS.items() if name != "count"}, "sample")
    with pytest.raises(InvalidArgumentError, match=r"sample must be a JSON object, found \[\]"):
        build(Sample, [], "sample")


@settings(max_examples=50)
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode()))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    try:
        parse_json(data)
    except InvalidArgumentError as error:
        message = str(error)
        assert message.isprintable()


@given(st.text(st.characters(), max_size=300), st.integers(2, 50))
def test_any_text_becomes_one_printable_line(text: str, limit: int) -> None:
    assert make_printable(text).isprintable()
    assert str(CornError(text)).isprintable()
    short = make_printable(text, limit=limit)
    assert short.isprintable()
    assert len(short) <= limit + 1


def test_control_characters_are_escaped() -> None:
    shown = make_printable("\x1b]0;title\x07 \u202e \x9b2J \u2028 \ud800 ε")
    assert shown == "\\x1b]0;title\\x07 \\u202e \\x9b2J \\ud800 ε"
