"""Options and notes of ``corn train`` on what choosing step sizes costs in privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import typer

from corn import learn
from corn.cli.learning import LEARNING
from corn.cli.output import print_note, working
from corn.privacy.rounding import round_up, write_exactly

TuningData: TypeAlias = Literal["data", "held-out"]
TuningPrices: TypeAlias = "tuple[dict[learn.Method, learn.TuningPrice], learn.TuningPrice | None]"
"""The price of each method's runs, and of all together."""


@dataclass(frozen=True)
class TuningOptions:
    """The data that step sizes are chosen on, and whether it is private."""

    private_tuning: Annotated[
        bool,
        typer.Option(
            "--private-tuning",
            help="Treat the agents' data as private, and print the ε that all runs spend together.",
            rich_help_panel=LEARNING,
        ),
    ] = False
    tune_on: Annotated[
        TuningData,
        typer.Option(
            help="Samples on which step sizes are chosen: the agents' data, or public held-out "
            "samples. With held-out samples, each mechanism trains only once per run on the "
            "agents' data.",
            rich_help_panel=LEARNING,
        ),
    ] = "data"

    def price(self, result: learn.Result) -> TuningPrices:
        """Return the price of each method's runs and of all, if the data is private."""
        if not self.private_tuning or result.status == "interrupted":
            return {}, None
        with working("adding up the runs"):
            return learn.price_tuning(result), learn.price_all(result)

    def collect(self, result: learn.Result, found: TuningPrices) -> dict[str, object]:
        """Return the runs on the agents' data and what they spend together, for JSON."""
        prices, total = found
        return {
            "data_is_private": self.private_tuning,
            "tuned_on": self.tune_on,
            "num_runs": len(result.trials) * len(result.seeds),
            "prices": {
                method.name: {**vars(price), "against": method.against}
                for method, price in prices.items()
            },
            "price_of_all": None if total is None else vars(total),
        }

    def print_notes(self, result: learn.Result, found: TuningPrices, task: str) -> None:
        """Print what the runs on the agents' data cost, or that they are counted as free."""
        num_methods = len({trial.method for trial in result.trials})
        is_tuned = len(result.trials) > num_methods
        if not self.private_tuning:
            if is_tuned:
                print_note(
                    f"step sizes were chosen from {len(result.trials)} runs per seed, which is "
                    f"counted as free because {task} is public; --private-tuning counts it"
                )
            return
        if result.status == "interrupted":
            print_note("private tuning: runs that were interrupted are not priced")
        prices, total = found
        for method, price in prices.items():
            # One run spends what the table shows.
            if price.num_runs == 1:
                continue
            print_note(
                f"private tuning: {method.name} made {price.num_runs} runs on the agents' data; "
                f"together they spend ε = {round_up(price.epsilon)} at δ = "
                f"{write_exactly(price.delta)}, not {write_exactly(price.epsilon_of_one)}, for "
                f"{price.protects}, against {method.against}, if {price.assumes}, which "
                "runs of a simulation have in common"
            )
        noiseless = sorted({t.method.name for t in result.trials if t.method.budget is None})
        if noiseless:
            print_note(
                f"private tuning: {', '.join(noiseless)} ran on the agents' data without noise, "
                "which no ε covers: leave it out where data is private"
            )
        if total is not None and len(prices) > 1:
            print_note(
                f"private tuning: all {total.num_runs} runs with noise together spend ε = "
                f"{round_up(total.epsilon)} at δ = {write_exactly(total.delta)}, for "
                f"{total.protects}, against {total.against}, if {total.assumes}"
            )
        if is_tuned:
            print_note(
                "--tune-on held-out chooses step sizes on held-out samples instead, which must be "
                "public, and spends one run; a comparison by validation loss is never covered by ε"
            )
