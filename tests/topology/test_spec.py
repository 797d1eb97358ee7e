"""Graph specs read what people write, and say what they would have accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corn.errors import InvalidArgumentError
from corn.topology import GENERATORS, GraphSpec, describe_kind


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("er:n=20,p=0.2,seed=1", "er:n=20,p=0.2,seed=1"),
        ("er:20,0.2", "er:n=20,p=0.2,seed=0"),
        ("er:p=0.2,n=20", "er:n=20,p=0.2,seed=0"),
        (" ring:20 ", "ring:n=20"),
        ("grid:4x5", "grid:rows=4,columns=5"),
        ("grid:columns=5,rows=4", "grid:rows=4,columns=5"),
        ("karate", "karate"),
        ("barbell:5", "barbell:clique=5,bridge=0"),
    ],
)
def test_spec_has_one_canonical_form(text: str, canonical: str) -> None:
    spec = GraphSpec.parse(text)
    assert str(spec) == canonical
    assert GraphSpec.parse(str(spec)) == spec


@given(
    n=st.integers(1, 10**6),
    p=st.floats(allow_nan=False, allow_infinity=False),
    seed=st.integers(0, 2**63),
)
def test_numbers_survive_the_round_trip(n: int, p: float, seed: int) -> None:
    spec = GraphSpec("er", (("n", n), ("p", p), ("seed", seed)))
    assert GraphSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown graph ''"),
        ("rign:20", "unknown graph 'rign:20': accepted are er, ring"),
        ("er", "n, p missing; accepted is er:n=…,p=…,seed=0"),
        ("er:n=20", "p missing"),
        ("er:n=20,q=1", "cannot place 'q=1'; accepted is er:n=…,p=…,seed=0"),
        ("er:n=20,n=30,p=1", "cannot place 'n=30'"),
        ("ring:20,30", "cannot place '30'"),
        ("ring:many", "n must be a whole number, found 'many'"),
        ("ring:20.5", "n must be a whole number, found '20.5'"),
        ("er:n=20,p=often", "p must be a number, found 'often'"),
        ("karate:3", "cannot place '3'; accepted is karate"),
    ],
)
def test_bad_specs_say_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        GraphSpec.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_kind_describes_itself() -> None:
    assert all(describe_kind(kind).startswith(kind) for kind in GENERATORS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ring:99999999", "at most 20,000 agents, found 99,999,999"),
        ("torus:10000x10000", "at most 20,000 agents, found 100,000,000"),
        ("barbell:9999999", "at most 20,000 agents"),
        ("er:n=20000,p=0.5", "at most 10,000,000 links, found about 1e\\+08"),
        ("complete:10000", "at most 10,000,000 links"),
        ("regular:n=20000,degree=19998", "at most 10,000,000 links"),
        ("geometric:n=20000,radius=1", "at most 10,000,000 links"),
    ],
)
def test_graphs_that_would_take_hours_are_refused_at_once(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        GraphSpec.parse(text).build()
