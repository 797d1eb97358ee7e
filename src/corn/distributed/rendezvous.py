"""Rendezvous before the first step: agents meet at a store and publish words to each other.

Every word is signed by its agent for one session, which is a hash of fresh random numbers from all
agents. So the host of the store can neither change or invent a word, nor replay one of another run,
nor show agents different words of the same agent. It can only withhold words; agents then
time out. Once training has begun no agent needs the store, unless others join later.

An agent may refuse before there is a session. So its refusal is bound to its fresh random number,
and to the session once it knows one. A refusal of another run is noticed, unless the host hides the
agent and repeats its old random number too. The effect is the same as if it withheld words.

A run that begins without some agents begins with more than half of them. Any two such sets have an
agent in common, which signs for one session only: the host cannot split one run into two.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from corn.distributed.start_errors import (
    AbsentError,
    RefusalError,
    raise_if_stopped,
)
from corn.distributed.words import ForgedWordError, SignedWords, split_word
from corn.errors import CornError, InvalidArgumentError, PublicError
from corn.learn.sweep import Interruption
from corn.noise.address import encode_fields
from corn.parsing import build, parse_json
from corn.transport import (
    NO_SESSION,
    Address,
    Credentials,
    LinkDesk,
    Listener,
    Purpose,
    RemoteStore,
    Store,
    StoreLostError,
)

_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_ANSWER = 1.0
# Between two requests to the store an agent looks for refusals and signals.
_LONGEST_WAIT = 0.2
_CHALLENGE_BYTES = 32
_JOIN, _RETURN = "join", "return"
_REFUSAL = "refusal"


@dataclass(frozen=True)
class Meeting:
    """The agents that take part in a run, and how to reach them.

    Attributes:
        session: stands for this run alone; all words and links are bound to it.
        addresses: of each member's listener.
    """

    session: bytes
    addresses: dict[int, Address]

    @property
    def members(self) -> tuple[int, ...]:
        """The agents that take part from the start."""
        return tuple(sorted(self.addresses))


@final
class Rendezvous:
    """One agent's access to the store, for one run and no more.

    Args:
        store: common to all agents.
        credentials: of this agent.
        listener: where neighbours reach it.
        address: of the listener, as others see it.
        bound: the address that it listens at.
        timeout: seconds to wait for other agents.
        keys: the folder of the agent's key and ledger; None in a rehearsal.
        is_host: whether the store lives in this process, and ends with it.
        interruption: ends every wait when a person requests it.
    """

    def __init__(
        self,
        store: Store,
        credentials: Credentials,
        *,
        listener: Listener,
        address: Address,
        timeout: float,
        bound: Address | None = None,
        keys: Path | None = None,
        is_host: bool = False,
        interruption: Interruption | None = None,
    ) -> None:
        self.store, self.credentials = store, credentials
        self._words = SignedWords(store, credentials)
        self.agent, self.num_agents = credentials.agent, credentials.roster.num_agents
        self.listener, self.address, self.timeout = listener, address, timeout
        self.bound = bound or address
        self.keys, self.interruption = keys, interruption
        self._is_host = is_host
        # One fresh number from each agent: a session that contains this agent's own is new,
        # whatever the host of the store shows of the others.
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        self._introduction = json.dumps([challenge, *address]).encode()
        # As read at the meeting: refusals are checked against these, whatever the store shows
        # later.
        self._introductions: dict[int, bytes] = {}
        self._meeting: Meeting | None = None
        self._topics: set[str] = set()

    @property
    def meeting(self) -> Meeting:
        """The agents of this run; waits for them when it is first asked for."""
        if self._meeting is None:
            self._meeting = self._meet()
        return self._meeting

    def publish(self, topic: str, message: bytes) -> None:
        """Publish a message to all agents; each agent publishes once per topic."""
        session = self.meeting.session
        # A second run through the same store would read the nonces of the first one as its own, and
        # so draw its noise again.
        if topic in self._topics:
            raise InvalidArgumentError(
                "this rendezvous has served a run, and its messages would be taken for new: use "
                "another store for another run"
            )
        self._topics.add(topic)
        # Signed with the session and the key of the place, so it is valid nowhere else.
        self._words.put(f"{topic}/{self.agent}", message, session)

    def gather(self, topic: str) -> dict[int, bytes]:
        """Return every member's message under a topic; raise ``AbsentError`` after the time-out."""
        members, session = self.meeting.members, self.meeting.session
        words = self._wait([f"{topic}/{agent}" for agent in members], topic, members)
        return {
            agent: self._words.read(word, f"{topic}/{agent}", agent, session)
            for agent, word in zip(members, words, strict=True)
        }

    def barrier(self, topic: str) -> None:
        """Wait until all agents have come here."""
        self.publish(topic, b"")
        self.gather(topic)

    def send(self, topic: str, receiver: int, package: bytes) -> None:
        """Leave a package for one agent."""
        self._words.put(f"{topic}/{self.agent}/{receiver}", package, self.meeting.session)

    def receive(self, topic: str, sender: int) -> bytes:
        """Return the package that another agent left for this one."""
        key, session = f"{topic}/{sender}/{self.agent}", self.meeting.session
        (word,) = self._wait([key], topic, [sender])
        return self._words.read(word, key, sender, session)

    def find_absent(self, *topics: str, seconds: float) -> list[int]:
        """Return the agents that have published under none of the topics after so many seconds."""
        deadline = time.monotonic() + seconds
        agents = range(self.num_agents) if self._meeting is None else self._meeting.members
        while True:
            found = {
                topic: self.store.get([f"{topic}/{agent}" for agent in agents]) for topic in topics
            }
            absent = [
                agent
                for place, agent in enumerate(agents)
                if all(found[topic][place] is None for topic in topics)
            ]
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(_LONGEST_WAIT / 10)

    def refuse(self, reason: str) -> None:
        """Publish that this agent does not start; every wait of another agent then ends."""
        # An agent that fails before the meeting knows no session. Its own random number binds the
        # refusal.
        session = "" if self._meeting is None else self._meeting.session.hex()
        message = json.dumps([reason, session]).encode()
        # Others check the refusal by the fresh random number in this word.
        self._words.put(f"{_JOIN}/{self.agent}", self._introduction, NO_SESSION, is_first=False)
        key = f"{_REFUSAL}/{self.agent}"
        self._words.put(key, message, _bind_refusal(self._introduction), is_first=False)

    def raise_refusal(self) -> None:
        """Raise ``RefusalError`` if another agent does not start.

        Raises:
            ForgedWordError: the refusal is of another run.
        """
        keys = [f"{_REFUSAL}/{agent}" for agent in range(self.num_agents)]
        for agent, word in enumerate(self.store.get(keys)):
            # The own refusal is no news: this agent has an error of its own to report.
            if word is not None and agent != self.agent:
                self._check_refusal(agent, keys[agent], word)

    def _check_refusal(self, agent: int, key: str, word: bytes) -> None:
        try:
            message = split_word(word).message
            reason, session = build(tuple[str, str], parse_json(message), "the refusal")
        except InvalidArgumentError as error:
            raise RefusalError(agent, f"a message that cannot be read: {error}") from error
        # The session cannot be compared yet. The refusal is read again after the meeting.
        if session and self._meeting is None:
            return
        self._words.read(word, key, agent, _bind_refusal(self._introduction_of(agent)))
        if session and self.meeting.session.hex() != session:
            raise ForgedWordError("refusal", agent)
        raise RefusalError(agent, reason)

    def leave(self) -> None:
        """Leave without having started; a host stays until all have left, for some seconds."""
        with suppress(CornError):
            self._words.put(f"parted/{self.agent}", b"", NO_SESSION)
            if self._is_host:
                # The store ends with this process: the others must have read the refusal before.
                # A person who pressed Ctrl-C should not wait so long for that.
                is_hurried = self.interruption is not None and self.interruption.requested
                patience = _SECONDS_TO_ANSWER if is_hurried else _SECONDS_TO_LEAVE
                self.find_absent("parted", seconds=min(self.timeout, patience))

    def open_desk(self, purpose: Purpose, *, max_bytes: int) -> LinkDesk:
        """Return a place to open links with other agents of the meeting."""
        return LinkDesk(
            self.listener,
            self.credentials,
            purpose,
            session=self.meeting.session,
            addresses=self.meeting.addresses,
            max_bytes=max_bytes,
        )

    def close(self) -> None:
        """Accept no more connections, and leave the store to others."""
        self.listener.close()
        if isinstance(self.store, RemoteStore):
            self.store.close()

    def check(self) -> None:
        """Raise if a person or another agent ended the start of the run."""
        self.check_interruption()
        self.raise_refusal()

    def check_interruption(self) -> None:
        """Raise if a person ended the start of the run."""
        raise_if_stopped(self.interruption)

    def announce_address(self) -> None:
        """Publish the address of an agent that returns, if the store is still there.

        Agents that return after it connect to it there.
        """
        # Under a topic of its own: a run that has not begun yet must not count on this agent.
        with suppress(StoreLostError):
            self._words.put(
                f"{_RETURN}/{self.agent}", self._introduction, NO_SESSION, is_first=False
            )

    def adopt(self, meeting: Meeting) -> None:
        """Take part in a meeting of others, which is over."""
        self._meeting = meeting

    def read_addresses(self) -> dict[int, Address]:
        """Return the addresses of all agents that have come to the store so far."""
        found: dict[int, Address] = {}
        for topic in (_JOIN, _RETURN):  # of the two addresses the later one
            keys = [f"{topic}/{agent}" for agent in range(self.num_agents)]
            for agent, word in enumerate(self.store.get(keys)):
                if word is not None and agent != self.agent:
                    message = self._words.read(word, keys[agent], agent, NO_SESSION)
                    found[agent] = _read_address(message, agent)
        return found

    def _meet(self) -> Meeting:
        """Publish a fresh challenge and this agent's address, and read those of the others."""
        self._words.put(f"{_JOIN}/{self.agent}", self._introduction, NO_SESSION)
        members = range(self.num_agents)
        words = self._wait([f"{_JOIN}/{agent}" for agent in members], _JOIN, members)
        joined = {
            agent: self._words.read(word, f"{_JOIN}/{agent}", agent, NO_SESSION)
            for agent, word in zip(members, words, strict=True)
        }
        # The own random number makes the session new. If it is not in there, the words are of
        # another run.
        if joined.get(self.agent) != self._introduction:
            raise ForgedWordError(_JOIN, self.agent)
        self._introductions = joined
        # Members are part of the hash, so agents that were shown different members have different
        # sessions, and their links do not open.
        parts = [part for agent in members for part in (agent, joined[agent])]
        session = hashlib.sha256(encode_fields("corn session", *parts)).digest()
        return Meeting(session, {agent: _read_address(joined[agent], agent) for agent in members})

    def _introduction_of(self, agent: int) -> bytes:
        """Return the word with an agent's random number: that of the meeting, or at the store."""
        if agent in self._introductions:
            return self._introductions[agent]
        key = f"{_JOIN}/{agent}"
        (word,) = self.store.get([key])
        return self._words.read(word or b"", key, agent, NO_SESSION)

    def _wait(self, keys: list[str], topic: str, agents: Sequence[int]) -> list[bytes]:
        deadline = time.monotonic() + self.timeout
        while True:
            found = self.store.get(keys, _LONGEST_WAIT)
            words = [word for word in found if word is not None]
            if len(words) == len(keys):
                return words
            # Only while words are missing. A refusal that comes after the last one is read by
            # ``confirm``.
            self.check()
            if time.monotonic() > deadline:
                absent = [a for a, word in zip(agents, found, strict=True) if word is None]
                raise AbsentError(topic, absent, self.timeout)


def _bind_refusal(introduction: bytes) -> bytes:
    """Return what stands in for the session in the signature of a refusal."""
    return hashlib.sha256(encode_fields("corn refusal", introduction)).digest()


def _read_address(message: bytes, agent: int) -> Address:
    try:
        _, host, port = build(tuple[str, str, int], parse_json(message), "the address")
    except InvalidArgumentError as error:
        raise PublicError(f"agent {agent} published an address that cannot be read") from error
    return host, port
