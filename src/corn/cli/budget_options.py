"""Options of a privacy budget, and the records that turn them into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import typer

from corn.cli.promises import (
    find_promises,
    normalise_delta,
    normalise_epsilon,
    parse_samples,
    require_one_each,
)
from corn.errors import InvalidArgumentError
from corn.privacy import Accounting, Adjacency, ClippedQuery, PrivacyBudget, Sampling, Unit
from corn.privacy.budget import fit_sampling
from corn.topology import Network

_EPSILON_HELP = (
    "ε of the whole run: a number, one for each agent separated by commas, or a .csv file with the "
    "columns agent,epsilon or agent,epsilon,delta."
)
_BUDGET = "Privacy budget"

BatchSizeOption: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Samples per mini-batch (with --unit sample only).", rich_help_panel=_BUDGET),
]


@dataclass(frozen=True)
class OpenBudgetOptions:
    """A privacy budget in which ε may be missing, because it is the result."""

    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER[,NUMBER…]|FILE",
            help=f"{_EPSILON_HELP} With --covariance: ε at which δ is reported.",
            callback=normalise_epsilon,
            rich_help_panel=_BUDGET,
        ),
    ] = None
    delta: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]",
            help="δ of the whole run, or one for each agent separated by commas.",
            callback=normalise_delta,
            rich_help_panel=_BUDGET,
        ),
    ] = "1e-05"
    steps: Annotated[
        int, typer.Option(help="Number of training steps T.", rich_help_panel=_BUDGET)
    ] = 5000
    clip: Annotated[
        float, typer.Option(help="Largest norm C of a clipped gradient.", rich_help_panel=_BUDGET)
    ] = 0.1
    unit: Annotated[
        Unit,
        typer.Option(
            help="Protected unit: an agent's whole data set (its mini-batch gradient is clipped "
            "once), or one sample (each sample's gradient is clipped).",
            rich_help_panel=_BUDGET,
        ),
    ] = "agent"
    accounting: Annotated[
        Accounting,
        typer.Option(
            help="Accountant: gdp is exact, rdp is the paper's Theorem 2, paper is its eq. (13b).",
            rich_help_panel=_BUDGET,
        ),
    ] = "gdp"
    adjacency: Annotated[
        Adjacency,
        typer.Option(
            help="Relation of neighbouring data sets: the unit's data is replaced by any other, or "
            "its gradient by zero (with Poisson sampling: a sample is added or removed).",
            rich_help_panel=_BUDGET,
        ),
    ] = "replace"
    sampling: Annotated[
        Sampling | None,
        typer.Option(
            help="Rule by which samples enter mini-batches (with --unit sample only): poisson, "
            "each by its own secret coin; passes, in batches of fixed size and a new secret order "
            "for each pass; every-step, any sample in any batch, which needs the most noise. "
            "(Default: poisson.)",
            rich_help_panel=_BUDGET,
        ),
    ] = None
    sampling_rate: Annotated[
        float | None,
        typer.Option(
            help="Probability that a sample is in a mini-batch (with --sampling poisson), "
            "instead of --samples-per-agent.",
            rich_help_panel=_BUDGET,
        ),
    ] = None
    samples_per_agent: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT[,COUNT…]",
            help="Declared number of samples of an agent, or one number for each agent, from which "
            "the sampling rate or the passes follow (with --unit sample only); with more samples "
            "or fewer, batches are larger or smaller. It is public, and ε does not cover it: "
            "declare a number that does not depend on the data. (Default for train: those of the "
            "data; for launch with a task the same, rounded down to two digits.)",
            rich_help_panel=_BUDGET,
        ),
    ] = None

    def make(self, batch_size: int | None, network: Network | None = None) -> PrivacyBudget:
        """Return the budget; a batch size belongs to the sample unit only.

        ``network`` has the names by which a file of promises calls the agents; without it they are
        numbered.
        """
        if self.epsilon is None:
            raise typer.BadParameter("give --epsilon, or --covariance to compute ε")
        return self._make(self.epsilon, batch_size, network)

    def make_query(self, batch_size: int | None) -> ClippedQuery:
        """Return the query that is released at each step, whatever ε is."""
        # The query does not depend on ε, but making a budget checks the other options.
        budget = self._make("1", batch_size, None)
        if not budget.is_uniform:
            raise InvalidArgumentError(
                "--samples-per-agent must be one number with --covariance, found "
                f"{self.samples_per_agent}"
            )
        return budget.query

    def _make(self, epsilon: str, batch_size: int | None, network: Network | None) -> PrivacyBudget:
        epsilons, deltas = find_promises(epsilon, self.delta, network)
        return PrivacyBudget(
            epsilon=epsilons,
            delta=deltas,
            num_steps=self.steps,
            clip=self.clip,
            unit=self.unit,
            accounting=self.accounting,
            adjacency=self.adjacency,
            batch_size=batch_size,
            sampling=self.sampling,
            sampling_rate=self.sampling_rate,
            samples_per_agent=require_one_each(
                "--samples-per-agent",
                parse_samples(self.samples_per_agent),
                None if network is None else network.num_agents,
            ),
        )


@dataclass(frozen=True)
class BudgetOptions(OpenBudgetOptions):
    """A privacy budget."""

    epsilon: Annotated[
        str,
        typer.Option(
            metavar="NUMBER[,NUMBER…]|FILE",
            help=_EPSILON_HELP,
            callback=normalise_epsilon,
            rich_help_panel=_BUDGET,
        ),
    ] = "10"

    @property
    def needs_sizes(self) -> bool:
        """Whether the sampling follows from the agents' data, because no option states it."""
        is_given = self.sampling_rate is not None or self.samples_per_agent is not None
        return self.unit == "sample" and self.sampling != "every-step" and not is_given

    def make_for_data(
        self, batch_size: int, sizes: Sequence[int], network: Network | None = None
    ) -> PrivacyBudget:
        """Return the budget of training in mini-batches on data sets of these sizes.

        The batch size and the numbers of samples count for the sample unit only.
        """
        chosen = self
        if self.needs_sizes:
            rate, samples = fit_sampling(sizes, batch_size, self.sampling)
            listed = samples if isinstance(samples, tuple) else (samples,)
            # Back to the text of options, so that one place parses and checks it.
            chosen = replace(
                self,
                sampling_rate=rate,
                samples_per_agent=None if samples is None else ",".join(map(str, listed)),
            )
        return chosen.make(batch_size if self.unit == "sample" else None, network)
