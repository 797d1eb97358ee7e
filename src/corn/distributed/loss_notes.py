"""Notes in an agent's journal on lost agents and broken links, each written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import networkx as nx

from corn.distributed.membership import Membership, NewsDelays, component_of, name_agents
from corn.distributed.settings import advise_return
from corn.distributed.survivors import measure_loss
from corn.plan import Plan
from corn.transport import Dropout, LinkError


@final
class LossNotes:
    """Notes of an agent on losses.

    Args:
        plan: the plan of all agents.
        agent: this agent's number.
        membership: this agent's knowledge of losses.
        delays: of the news of them.
        note: writes a line to the journal.
    """

    def __init__(
        self,
        plan: Plan,
        agent: int,
        *,
        membership: Membership,
        delays: NewsDelays,
        note: Callable[[str], None],
    ) -> None:
        self._plan, self._agent = plan, agent
        self._membership, self._delays, self._note = membership, delays, note
        self._open_cuts: dict[int, int] = {}
        self._reported: frozenset[int] = frozenset()

    def note_dropout(self, peer: int, error: LinkError, step: int, *, timeout: float) -> None:
        """Note how a neighbour was lost."""
        how = {
            Dropout.CLOSED: "closed its connection",
            Dropout.SILENT: f"sent nothing for {timeout:g} s (time-out)",
            Dropout.STALLED: "is alive, but its step does not end",
            Dropout.TAMPERED: "is no longer linked, as somebody tampered with the connection",
            Dropout.MISBEHAVED: f"is no longer linked, as it broke the protocol ({error})",
        }[error.dropout]
        self._note(f"agent {peer} {how} at step {step}")

    def watch_cut(self, peer: int, step: int) -> None:
        """Remember a break of an own link, until it is known whether its other end is lost."""
        self._open_cuts[peer] = step

    def report(self, step: int) -> None:
        """Note what is known by a step of broken links and lost agents."""
        self._report_cut_links(step)
        self._report_losses(step)

    def _report_cut_links(self, step: int) -> None:
        """Note once for each own link that broke whether its other end still takes part."""
        for peer, when in list(self._open_cuts.items()):
            # By then all neighbours of a lost agent have noticed, and this agent has heard of it.
            if step < when + self._delays.spread + self._delays.settling:
                continue
            del self._open_cuts[peer]
            if peer not in self._membership.lost_by(step):
                self._note(
                    f"agent {peer} is alive, as others reach it: only its link to agent "
                    f"{self._agent} was cut at step {when}"
                )

    def _report_losses(self, step: int) -> None:
        """Note once for each loss what it means for the rest."""
        lost = frozenset(self._membership.lost_by(step))
        is_new, self._reported = bool(lost - self._reported), lost
        if not is_new:
            return
        graph = nx.Graph(self._plan.network.graph)
        cuts = self._membership.cuts_by(step)
        own = component_of(graph, self._agent, cuts)
        if set(graph) - set(own) - lost:
            who = ", ".join(map(str, own))
            self._note(f"the survivors are cut apart; linked to each other here: {who}")
        alone = "alone, " if len(own) == 1 else ""
        energy = measure_loss(self._plan, own, cuts).describe()
        self._note(f"went on {alone}without {name_agents(lost)}: {energy}")
        since = self._membership.alone_since(step)
        if since is not None:
            self._note(
                f"has no neighbour left since step {since}, and trains on its own data alone; if "
                f"others still run, {advise_return(self._plan)}"
            )
