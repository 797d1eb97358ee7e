"""Agents find the store, and every failure to do so is one clear line."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from corn.distributed import rendezvous
from corn.distributed.rendezvous import (
    AbsentError,
    ForgedEntryError,
    RefusalError,
    Rendezvous,
    announcing_failure,
    join,
    join_store,
    naming_agent,
)
from corn.errors import CornError, StoppedByUserError
from corn.learn.sweep import Interruption
from corn.noise.stream import encode_fields
from corn.transport import NO_SESSION, MemoryStore, Purpose, StoreHost, StoreLostError, dial

from .threads import make_credentials, make_rendezvous, run_in_threads


def test_waiting_for_a_store_can_be_interrupted() -> None:
    """No program listens at one address, and none answers at the other."""
    for host in ("127.0.0.1", "192.0.2.1"):
        interruption, began = Interruption(), time.monotonic()
        threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
        with pytest.raises(StoppedByUserError, match=r"^agent 3: interrupted"):
            join(make_credentials(3, 4), store=(host, 1), timeout=60, interruption=interruption)
        assert time.monotonic() - began < 30


def test_a_rendezvous_serves_one_run() -> None:
    def run(rendezvous: Rendezvous) -> None:
        rendezvous.agree("hello", "nonce 1")
        rendezvous.agree("hello", "nonce 2")

    (result,) = run_in_threads(1, run)
    assert isinstance(result, ForgedEntryError)
    assert "start all agents anew with a new store" in str(result)


def test_the_host_of_the_store_leaves_last() -> None:
    host = StoreHost(("127.0.0.1", 0), make_credentials(0, 3))

    def run(rendezvous: Rendezvous) -> None:
        hosted = host if rendezvous.agent == 0 else None
        own = make_rendezvous(rendezvous.agent, 3, host.entries, timeout=60, host=hosted)
        own.listener.close()
        time.sleep(0.2 * rendezvous.agent)
        with announcing_failure(own):
            raise CornError("no")

    began = time.monotonic()
    results = run_in_threads(3, run)
    assert [str(result) for result in results] == [f"agent {agent}: no" for agent in range(3)]
    assert 2 <= time.monotonic() - began < 30
    host.close()


def test_a_port_in_use_and_a_missing_store_are_reported_in_one_line() -> None:
    own = make_credentials(0, 2)
    store = StoreHost(("127.0.0.1", 0), own)
    with pytest.raises(CornError, match="cannot listen there"):
        StoreHost(("127.0.0.1", store.port), own)
    with pytest.raises(CornError, match=r"127\.0\.0\.1:1"):
        join_store(("127.0.0.1", 1), own, timeout=0.5)
    store.close()


def test_one_agent_holds_a_few_connections_to_the_store_and_keeps_the_newest() -> None:
    host = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    where, own = ("127.0.0.1", host.port), make_credentials(1, 2)
    before = threading.active_count()
    opened = [dial(where, own, 0, Purpose.STORE, session=NO_SESSION, timeout=20) for _ in range(40)]
    newest = join_store(where, own, timeout=20)
    assert newest.set("word/1", b"word") == b"word"
    deadline = time.monotonic() + 20
    while threading.active_count() > before + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 4
    for channel in opened:
        channel.close()
    newest.close()
    host.close()


@pytest.mark.slow
def test_a_port_of_another_program_is_not_waited_for_beyond_the_time_out() -> None:
    """The program accepts connections and never answers."""
    own = make_credentials(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = other.getsockname()
        with pytest.raises(CornError, match=r"did not prove the key"):
            join_store(where, own, timeout=0.5)
        interruption = Interruption()
        threading.Timer(0.2, setattr, (interruption, "requested", True)).start()
        with pytest.raises(StoppedByUserError):
            join_store(where, own, timeout=20, interruption=interruption)
        with pytest.raises(CornError, match=r"^agent 0: .*cannot listen there"):
            join(make_credentials(0, 2), store=where, timeout=1)


def test_the_store_listens_at_its_address_only() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    socket.create_connection(("127.0.0.1", store.port), timeout=1).close()
    for elsewhere in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|Cannot assign"):
            socket.create_connection((elsewhere, store.port), timeout=1)
    store.close()


def test_only_agents_of_the_roster_reach_the_store() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    where = ("127.0.0.1", store.port)
    found = join_store(where, make_credentials(1, 2), timeout=60)
    assert found.set("hello/1", b"word") == b"word"
    assert store.entries.get(["hello/1"]) == [b"word"]
    # Of another roster, in which the numbers exist too.
    with pytest.raises(CornError, match="did not prove the key of agent 0"):
        join_store(where, make_credentials(1, 3), timeout=0.5)
    found.close()
    store.close()


def test_an_agent_writes_under_its_own_number_only() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 3))
    for key in ("hello/2", "hello", "hello/1x", "/1", "seed/2/1"):
        found = join_store(("127.0.0.1", store.port), make_credentials(1, 3), timeout=60)
        with pytest.raises(StoreLostError):
            found.set(key, b"word")
        assert store.entries.get([key]) == [None]
        found.close()
    store.close()


def test_no_request_makes_the_host_build_an_endless_answer() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    found = join_store(("127.0.0.1", store.port), make_credentials(1, 2), timeout=60)
    found.set("hello/1", bytes(1 << 20))
    assert len(found.get(["hello/1"] * 3)) == 3
    with pytest.raises(StoreLostError):
        found.get(["hello/1"] * 10_000)  # 10 GB
    found.close()
    store.close()


def test_a_word_is_written_once() -> None:
    store = MemoryStore()
    assert store.set("a/0", b"first") == b"first"
    assert store.set("a/0", b"second") == b"first"
    assert store.get(["a/0", "b/0"], 0.01) == [b"first", None]


def meet_both(store: MemoryStore) -> list[Rendezvous]:
    """Return two agents that have met at a store."""
    both = [make_rendezvous(agent, 2, store, timeout=20) for agent in range(2)]
    threads = [threading.Thread(target=lambda own=own: own.meeting) for own in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in both:
        own.listener.close()
    return both


def publish(own: Rendezvous, message: bytes) -> None:
    own._put("hello", message, own.meeting.session)


def gather(own: Rendezvous) -> dict[int, bytes]:
    return own._wait("hello", own.meeting.session, 20)


class LyingStore(MemoryStore):
    """A store whose host shows one agent other words than were published."""

    def __init__(self, store: MemoryStore, lies: dict[str, bytes]) -> None:
        self._store, self._lies = store, lies

    def set(self, key: str, word: bytes) -> bytes:
        return self._store.set(key, word)

    def get(self, keys: Any, seconds: float = 0.0) -> list[bytes | None]:
        found = self._store.get(keys, seconds)
        return [self._lies.get(key, word) for key, word in zip(keys, found, strict=True)]


def test_a_host_that_replays_a_word_of_an_earlier_run_is_detected() -> None:
    earlier = MemoryStore()
    old = meet_both(earlier)
    for own in old:
        publish(own, b"nonce %d" % own.agent)
    (replayed,) = earlier.get(["hello/1"])
    now = MemoryStore()
    first, second = meet_both(now)
    publish(first, b"new nonce")
    publish(second, b"new nonce")
    first.store = LyingStore(now, {"hello/1": replayed or b""})
    with pytest.raises(ForgedEntryError, match=r"message \(hello\).* agent 1 "):
        gather(first)


def test_a_host_that_shows_agents_different_words_is_detected() -> None:
    """It has two challenges that agent 1 signed, and shows each agent another one."""
    earlier, now = MemoryStore(), MemoryStore()
    meet_both(earlier)
    (other,) = earlier.get(["join/1"])
    results: list[object] = []
    first = make_rendezvous(0, 2, LyingStore(now, {"join/1": other or b""}), timeout=20)
    second = make_rendezvous(1, 2, now, timeout=20)

    def talk(own: Rendezvous) -> None:
        try:
            publish(own, b"terms")
            results.append(gather(own))
        except ForgedEntryError as error:
            results.append(error)

    threads = [threading.Thread(target=talk, args=(own,)) for own in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in (first, second):
        own.listener.close()
    assert [type(result) for result in results] == [ForgedEntryError] * 2


@pytest.mark.parametrize("change", ["message", "signature", "none"])
def test_a_host_cannot_change_or_invent_words(change: str) -> None:
    store = MemoryStore()
    first, second = meet_both(store)
    publish(first, b"a")
    publish(second, b"b")
    (word,) = store.get(["hello/1"])
    assert word is not None
    lie = {
        "message": encode_fields(b"c", word[-64:]),
        "signature": word[:-1] + bytes([word[-1] ^ 1]),
        "none": b"c",
    }[change]
    first.store = LyingStore(store, {"hello/1": lie})
    with pytest.raises(ForgedEntryError):
        gather(first)


def test_a_second_process_under_the_same_number_is_detected() -> None:
    store = MemoryStore()
    meet_both(store)
    twin = make_rendezvous(0, 2, store, timeout=1)
    twin.listener.close()
    with pytest.raises(ForgedEntryError, match="number of agent 0 "):
        publish(twin, b"a")


def refuse_earlier(agent: int, *, has_met: bool) -> bytes:
    """Return the refusal of an agent in an earlier run of two."""
    store = MemoryStore()
    own = meet_both(store)[agent] if has_met else make_rendezvous(agent, 2, store)
    own.refuse("no key")
    own.listener.close()
    (word,) = store.get([f"refusal/{agent}"])
    assert word is not None
    return word


@pytest.mark.parametrize("had_met", [False, True])
def test_a_refusal_of_an_earlier_run_is_recognised(*, had_met: bool) -> None:
    replayed, now = refuse_earlier(1, has_met=had_met), MemoryStore()
    first, _ = meet_both(now)
    first.store = LyingStore(now, {"refusal/1": replayed})
    with pytest.raises(ForgedEntryError, match=r"message \(refusal\).* agent 1 "):
        first.check()


@pytest.mark.parametrize("has_met", [False, True])
def test_a_refusal_of_this_run_stops_the_others(*, has_met: bool) -> None:
    store = MemoryStore()
    if has_met:
        first, second = meet_both(store)
    else:
        first, second = (make_rendezvous(agent, 2, store) for agent in range(2))
    second.refuse("no key")
    with pytest.raises(RefusalError, match=r"because agent 1 refused: no key$"):
        first.check()
    for own in (first, second):
        own.listener.close()


def test_an_agent_advertises_its_address_on_the_route_to_the_store() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    where = ("127.0.0.1", store.port)
    own = make_credentials(0, 2)
    found = join(own, store=where, timeout=60, opens_store=False)
    assert (found.agent, found.num_agents) == (0, 2)
    assert found.address == found.bound == ("127.0.0.1", found.listener.port)
    behind_nat = join(
        own,
        store=where,
        timeout=60,
        opens_store=False,
        listen=("0.0.0.0", 0),
        advertise=("clinic.example", 29600),
    )
    assert behind_nat.address == ("clinic.example", 29600)
    everywhere = join(own, store=where, timeout=60, opens_store=False, listen=("0.0.0.0", 0))
    assert everywhere.address[0] == "127.0.0.1"
    for joined in (found, behind_nat, everywhere):
        joined.close()
    store.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_agents_meet_at_one_port_of_ipv4_or_ipv6(host: str) -> None:
    """The host of the store listens at the store's port, and others on this machine at any."""
    with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as taken:
        port = taken.getsockname()[1]
    first = join(make_credentials(0, 2), store=(host, port), timeout=20)
    second = join(make_credentials(1, 2), store=(host, port), timeout=20)
    assert first.address == (host, port)
    assert second.address[0] == host
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda own: own.agree("colour", "blue"), (first, second)))
    second.close()
    first.close()
    socket.create_server((host, port), family=socket.getaddrinfo(host, 0)[0][0]).close()


def test_an_agent_that_cannot_listen_leaves_no_store_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = free.getsockname()
        with pytest.raises(CornError, match=r"cannot listen there.*--listen ADDRESS:PORT"):
            join(make_credentials(0, 2), store=where, timeout=1, listen=taken)
    socket.create_server(where).close()


def test_away_from_loopback_the_port_is_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Firewalls must be opened for it, so it cannot be any free one."""
    monkeypatch.setattr(rendezvous, "_find_route", lambda *_: "192.0.2.7")
    assert rendezvous._choose_place(("10.0.0.1", 1), None, is_host=False) == ("192.0.2.7", 29500)
    stated = ("clinic.example", 41431)
    assert rendezvous._choose_place(("a", 1), stated, is_host=True) == ("192.0.2.7", 41431)


def test_the_start_has_a_time_of_its_own_and_names_those_that_are_missing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_SECONDS_OF_SILENCE", 0.0)
    caplog.set_level("INFO", "corn")
    store = MemoryStore()
    first = make_rendezvous(0, 2, store, timeout=0.1, wait=20)
    second = make_rendezvous(1, 2, store, timeout=0.1, wait=20)
    threading.Timer(0.6, lambda: second.meeting).start()
    assert first.meeting.addresses.keys() == {0, 1}
    assert "waits for agent 1" in caplog.text
    with pytest.raises(AbsentError, match=r"hello.*agent 1 within 0\.1 s"):
        first.exchange("hello", b"")
    for own in (first, second):
        own.close()


def test_a_cut_connection_to_the_store_is_opened_again() -> None:
    store = StoreHost(("127.0.0.1", 0), make_credentials(0, 2))
    found = join_store(("127.0.0.1", store.port), make_credentials(1, 2), timeout=8)
    found.set("hello/1", b"word")
    for served in list(store.listener._served.values()):
        for channel in list(served):
            channel.close()
    assert found.get(["hello/1"]) == [b"word"]
    store.close()
    began = time.monotonic()
    with pytest.raises(StoreLostError):
        found.get(["hello/1"])
    assert time.monotonic() - began < 30
    found.close()


def test_failures_call_agents_by_their_names_once() -> None:
    names = ["Oslo", "Rome", "Kyiv"]
    with pytest.raises(AbsentError) as failure, naming_agent(1, names), naming_agent(1, names):
        raise AbsentError("no message (join) from agents 0, 2 within 3 s")
    assert str(failure.value).endswith(
        "agent 1 (Rome): no message (join) from agents 0 (Oslo), 2 (Kyiv) within 3 s"
    )
