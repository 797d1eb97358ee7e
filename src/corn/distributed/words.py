"""Signed words at the store, whose host can withhold them, but neither change nor invent one."""

from __future__ import annotations

from typing import NamedTuple, final

from corn.errors import InvalidArgumentError, PublicError
from corn.noise.address import decode_fields, encode_fields
from corn.transport import Credentials, Store


class ForgedWordError(PublicError):
    """A word at the store that its agent did not sign for this run: ``agent``, under ``topic``."""

    def __init__(self, topic: str, agent: int) -> None:
        self.topic, self.agent = topic, agent
        super().__init__(
            f"the store has a message ({topic}) under the number of agent {agent} which that agent "
            "did not sign for this run: a second run uses the store, or its host cannot be "
            "trusted; start all agents anew with a new store"
        )


class Word(NamedTuple):
    """A word at the store: what an agent published, and its signature."""

    message: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Return the word as bytes."""
        return encode_fields(self.message, self.signature)


@final
class SignedWords:
    """The words of a run, as one agent writes and reads them."""

    def __init__(self, store: Store, credentials: Credentials) -> None:
        self._store, self._credentials = store, credentials

    def put(self, key: str, message: bytes, session: bytes, *, is_first: bool = True) -> None:
        """Publish a message under a key, signed; raise if the key has another word of this agent.

        With ``is_first=False`` a word that is there already stays, and is no error.
        """
        signature = self._credentials.identity.sign(signed_text(key, message, session))
        word = Word(message, signature).encode()
        # Signatures are deterministic: another word under this agent's key is another process's.
        if self._store.set(key, word) != word and is_first:
            raise ForgedWordError(key.partition("/")[0], self._credentials.agent)

    def read(self, word: bytes, key: str, agent: int, session: bytes) -> bytes:
        """Return the message of a word that its agent signed for this session."""
        topic = key.partition("/")[0]
        if not 0 <= agent < self._credentials.roster.num_agents:
            raise ForgedWordError(topic, agent)
        try:
            message, signature = split_word(word)
        except InvalidArgumentError:
            raise ForgedWordError(topic, agent) from None
        text = signed_text(key, message, session)
        if not self._credentials.roster.verify(agent, signature, text):
            raise ForgedWordError(topic, agent)
        return message


def signed_text(key: str, message: bytes, session: bytes) -> bytes:
    """Return what an agent signs: its message, the place at the store, and the session."""
    # With lengths, so no two triples give the same bytes; the prefix keeps these signatures apart
    # from those of rotations.
    return encode_fields("corn word", session, key, message)


def split_word(word: bytes) -> Word:
    """Return message and signature, neither of them checked."""
    fields = decode_fields(word)
    if fields is None or len(fields) != 2:
        raise InvalidArgumentError("not a signed message of CorN")
    return Word(*fields)
