"""Failures of a run before its first step: agents that are absent, refuse or are stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from corn.distributed.membership import name_agents
from corn.errors import CornError, PublicError, StoppedByUserError, make_printable
from corn.learn.sweep import Interruption

_MAX_REASON = 300


class AbsentError(PublicError):
    """Some agents published nothing in time: ``agents``, under ``topic``."""

    def __init__(self, topic: str, agents: Sequence[int], seconds: float) -> None:
        self.topic, self.agents = topic, tuple(agents)
        super().__init__(f"no message ({topic}) from {name_agents(agents)} within {seconds:g} s")


class RefusalError(PublicError):
    """Another agent cannot start, so none does: ``refused_by``."""

    def __init__(self, refused_by: int, reason: str) -> None:
        self.refused_by, self.reason = refused_by, make_printable(reason, limit=_MAX_REASON)
        super().__init__(f"does not start, because agent {refused_by} refused: {self.reason}")


class StoppedBeforeStartError(PublicError, StoppedByUserError):
    """A person stopped an agent before its first step."""

    def __init__(self) -> None:
        super().__init__("interrupted before the first step, nothing was released")


def raise_if_stopped(interruption: Interruption | None) -> None:
    """Raise if a person ended the start of the run."""
    if interruption is not None and interruption.requested:
        raise StoppedBeforeStartError


@contextmanager
def naming_agent(agent: int) -> Iterator[None]:
    """Begin the message of every failure inside with the agent's number."""
    try:
        yield
    except CornError as error:
        # In place, so that the type and its fields stay: callers decide by them.
        error.args = (f"agent {agent}: {error}",)
        raise
    except OSError as error:
        what = f"{error.filename or 'file'}: {error.strerror or error}"
        raise CornError(f"agent {agent}: {what}") from error
