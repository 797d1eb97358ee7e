"""Whatever is in the store, an agent fails with one printable line."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from random import Random

import pytest

from corn.distributed.rendezvous import (
    ForgedEntryError,
    HandshakeError,
    Hello,
    RefusalError,
    Rendezvous,
    _bind_refusal,
    shake_hands,
    signed_text,
)
from corn.noise.stream import encode_fields
from corn.transport import MemoryStore

from ..mutations import find_complaint, is_clear, mutate
from .threads import make_rendezvous

HELLO = Hello("ab" * 32, {"steps": "10"}, "cd" * 32, 10, (0, 5))
REFUSAL = "refusal/1"
# Both sides of a difference are shown in full, up to 2000 characters each.
LONGEST_DIFFERENCE = 4200
WORD = json.dumps(asdict(HELLO)).encode()


def meet(words: dict[str, bytes], *, signs: bool = True) -> Rendezvous:
    """Return agent 0 of two, at a store that has some messages of agent 1."""
    store = MemoryStore()
    own, other = (make_rendezvous(agent, 2, store) for agent in range(2))
    for rendezvous in (own, other):
        rendezvous.listener.close()
    threads = [threading.Thread(target=lambda each=each: each.meeting) for each in (own, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own.timeout = 0.5  # seconds in which messages must be found that are in the store already
    for key, word in words.items():
        session = own.meeting.session
        if key == REFUSAL:
            session = _bind_refusal(other._introduction)
        signature = other.credentials.identity.sign(signed_text(key, word, session))
        store.set(key, encode_fields(word, signature) if signs else word)
    return own


def change_hello(**changes: object) -> bytes:
    return json.dumps({**asdict(HELLO), **changes}).encode()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (b"[" * 100_000, "nested more than 20 deep"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"{", "not JSON"),
        (b"null", "must be a JSON object, found None"),
        (b'{"plan": 1, "plan": 2}', "the key 'plan' occurs twice"),
        (b" " * (1 << 21), "more than 1,048,576 bytes"),
        (change_hello(extra=1), "unknown entry 'extra'"),
        (WORD.replace(b'"nonce"', b'"once"'), "'nonce' is missing"),
        (change_hello(nonce="zz" * 32), "nonce must be in hexadecimal"),
        (change_hello(nonce="ab"), "nonce must be 32 bytes, found 1 bytes"),
        (change_hello(plan=5), "plan cannot be 5"),
        (change_hello(terms={"steps": 5}), "terms cannot be 5"),
        (change_hello(terms=[]), "terms cannot be []"),
        (change_hello(remaining=True), "remaining cannot be True"),
        (change_hello(remaining=-1), "must not be negative"),
        (change_hello(remaining=10**400), "a whole number of more than 20 digits"),
        (change_hello(remaining=float("nan")), "'NaN' is not a finite number"),
        (change_hello(checkpoints=[]), "checkpoints must include step 0"),
        (change_hello(checkpoints=[0, None]), "checkpoints cannot be None"),
        (change_hello(first_free_step=None), "first_free_step cannot be None"),
    ],
)
def test_a_damaged_hello_is_explained(word: bytes, message: str) -> None:
    with pytest.raises(HandshakeError) as caught:
        shake_hands(meet({"hello/1": word}), HELLO)
    assert str(caught.value).startswith("agent 1's message (hello) is damaged, or of another")
    assert message in str(caught.value)
    assert is_clear(caught.value)


def test_escape_codes_of_other_agents_are_printed_as_text() -> None:
    nasty = "\x1b[2J\n\u202e" + "x" * 10_000
    for word in (
        change_hello(terms={nasty: "1", "steps": "10"}),
        change_hello(terms={"steps": nasty}),
        change_hello(**{nasty: 1}),
    ):
        with pytest.raises(HandshakeError, match=r"\\x1b\[2J") as caught:
            shake_hands(meet({"hello/1": word}), HELLO)
        assert is_clear(caught.value, limit=LONGEST_DIFFERENCE)
    with pytest.raises(RefusalError, match=r"agent 1 refused: \\x1b\[2J \\u202exx") as refused:
        meet({REFUSAL: nasty.encode()}).raise_refusal()
    assert is_clear(refused.value)


@pytest.mark.parametrize("word", [b"[" * 100_000, b"", b"\xff"])
def test_an_unreadable_refusal_counts_as_a_refusal(word: bytes) -> None:
    with pytest.raises(RefusalError, match="because agent 1 refused") as caught:
        meet({REFUSAL: word}).raise_refusal()
    assert is_clear(caught.value)


def test_no_message_in_the_store_crashes_an_agent() -> None:
    said = {
        "hello/1": WORD,
        "ready/1": b"ab" * 32,
        REFUSAL: b"no key",
    }
    listen: dict[str, Callable[[Rendezvous], object]] = {
        "hello/1": lambda rendezvous: shake_hands(rendezvous, HELLO),
        "ready/1": lambda rendezvous: rendezvous.agree("ready", "ab" * 32),
        REFUSAL: Rendezvous.raise_refusal,
    }
    for seed in range(240):
        topic = list(said)[seed % 3]
        rendezvous = meet({topic: mutate(said[topic], Random(seed))})
        error = find_complaint(listen[topic], rendezvous)
        assert error is None or (
            is_clear(error, limit=LONGEST_DIFFERENCE)
            and isinstance(error, HandshakeError | RefusalError | ForgedEntryError)
        ), (seed, error)
