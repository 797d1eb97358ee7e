"""Returns of agents, as seen by an agent that takes part: requests, links and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

from torch import Tensor

from corn.distributed.handshake import Hello
from corn.distributed.membership import Membership
from corn.distributed.messages import Header
from corn.distributed.public_state import PublicState
from corn.distributed.rejoin import Applicant, Sponsor, Welcome, refuse_terms
from corn.transport import Address, Link, LinkDesk, LinkError


@final
class Returns:
    """The agents that ask this one to let them in again.

    Args:
        hello: the own terms, which theirs must match.
        sponsor: where they ask.
        desk: where they connect.
        welcome: returns the terms of a return at a step, to agents that take part.
        last_step: of the run.
        timeout: seconds to wait for the link of an agent whose step has come.
        to_dial: the addresses of agents to which this one connects at its own return; all others
            connect to it.
        waits_for_all: whether all agents wait for one that returns, as with exact sums: one returns
            at a time, and is called, where gossip counts on it from an announced step on.
    """

    def __init__(
        self,
        hello: Hello,
        sponsor: Sponsor,
        desk: LinkDesk,
        *,
        welcome: Callable[[int, tuple[int, ...]], Welcome],
        last_step: int,
        timeout: float,
        to_dial: Mapping[int, Address] | None = None,
        waits_for_all: bool = False,
    ) -> None:
        self._hello, self._sponsor, self._desk = hello, sponsor, desk
        self._welcome, self._last_step, self._timeout = welcome, last_step, timeout
        self._to_dial, self._waits_for_all = dict(to_dial or {}), waits_for_all
        self._admitted: dict[int, tuple[int, Applicant]] = {}
        self._banned, self._unconfirmed, self._awaited = set[int](), set[int](), set[int]()

    @property
    def to_dial(self) -> frozenset[int]:
        """The agents to which this one still has to connect."""
        return frozenset(self._to_dial)

    def serve(self, step: int, membership: Membership, notice: int) -> None:
        """Answer all requests before a step; news of a return takes ``notice`` steps to spread."""
        for applicant in self._sponsor.take_applicants():
            agent = applicant.agent
            # It may ask before its loss has been noticed: its old link ends first. Or it may ask
            # again before the step of a return that came to nothing, at which its neighbours still
            # expect it: they would take its new link for the old return, and wait in vain.
            is_awaited = membership.is_awaited(None if self._waits_for_all else agent, step)
            if agent not in membership.lost_by(step) or is_awaited:
                self._sponsor.put_back(applicant)
                continue
            # All agents must know of a return before its step, as they switch plans and open links
            # at it.
            return_step = max(step + notice + 1, applicant.request.first_free_step)
            present = membership.present_at(step)
            if applicant.request.wants_company and len(present) == 1:
                applicant.answer(Welcome(refusal="this agent trains alone", is_alone=True))
                continue
            refusal = self._refuse(applicant, return_step)
            if refusal:
                applicant.answer(Welcome(refusal=refusal))
                continue
            applicant.answer(self._welcome(return_step, present))
            # Nobody announces the return of an agent but itself.
            proof = applicant.confirm()
            if not membership.confirms_return(agent, return_step, proof):
                self._unconfirmed.add(agent)
                applicant.close()
                continue
            if self._waits_for_all:
                membership.note_call(agent, return_step, proof)
            else:
                membership.note_return(agent, return_step, proof)
            self._admitted[agent] = return_step, applicant
        for _, applicant in self._admitted.values():
            applicant.report_step(step)

    def _refuse(self, applicant: Applicant, return_step: int) -> str:
        """Return why an agent is not let in; empty if it is."""
        left = self._last_step - return_step
        if applicant.agent in self._banned:
            return "it broke the protocol in this run"
        # Each time would cost this agent a wait.
        if applicant.agent in self._unconfirmed:
            return "it asked before, and did not confirm its return"
        if left <= 0:
            return "the run ends before it could take part again"
        # As at the start of a run, all ledgers must allow all steps: new plans for survivors are
        # made for the steps that are left, and all agents must count the same.
        if applicant.request.hello.remaining < left:
            return f"its ledger allows fewer releases than the {left} steps that are left"
        return refuse_terms(self._hello, applicant.request, applicant.agent)

    def connect(self, agent: int) -> Link:
        """Return the link to an agent whose step has come; raise ``LinkError`` without one."""
        address = self._to_dial.pop(agent, None)
        if agent in self._banned:
            self._desk.reject(agent)
            raise LinkError(f"agent {agent} broke the protocol, and is not linked again")
        # One that announces its return and does not come costs a time-out once.
        timeout = 0.0 if agent in self._awaited else self._timeout
        self._awaited.add(agent)
        if address is not None:
            link = self._desk.connect(agent, address, timeout=timeout)
        else:
            link = self._desk.wait(agent, timeout=timeout)
        self._awaited.discard(agent)
        return link

    def ban(self, agent: int) -> None:
        """Let an agent never in again, as it broke the protocol."""
        self._banned.add(agent)

    def hand_over(
        self, step: int, header: Header, parameters: Tensor, state: PublicState | None = None
    ) -> None:
        """Send the model to the agents whose step has come, and with exact sums the state."""
        for agent, (when, applicant) in list(self._admitted.items()):
            if when == step:
                applicant.hand_over(header, parameters, state or {})
                del self._admitted[agent]

    def reject(self, agents: Iterable[int]) -> None:
        """Close the connections of agents that cannot return now."""
        for agent in agents:
            self._desk.reject(agent)

    def cancel(self, step: int) -> None:
        """Let agents ask again that were to return by a step, and have not."""
        for agent, (when, applicant) in list(self._admitted.items()):
            if when <= step:
                applicant.close()
                del self._admitted[agent]

    def stop(self) -> None:
        """Let nobody in any more, and close the connections that nobody took."""
        self.close()
        self._desk.close()

    def close(self) -> None:
        """Let nobody in any more."""
        for applicant in self._sponsor.take_applicants():
            applicant.answer(Welcome(refusal="the run ends before it could take part again"))
        # A stop may come before the step of a return that was promised.
        for _, applicant in self._admitted.values():
            applicant.close()
        self._admitted = {}
