"""``corn design``: choose the noise covariance for one network, budget and mechanism."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import numpy as np
import typer

from corn.cli.budget_options import BatchSizeOption, BudgetOptions
from corn.cli.options import (
    GraphOption,
    JsonOption,
    MechanismOption,
    MixingOptions,
    PlotOption,
    ThreatOptions,
    choose_mechanism,
)
from corn.cli.output import (
    print_facts,
    print_json,
    print_note,
    print_written,
    save_json,
    warn_of_insiders,
)
from corn.cli.strictest import describe_average, strictest_facts
from corn.cli.watching import designing, raise_if_interrupted
from corn.covariance import (
    Auto,
    ClosedForm,
    Corn,
    Design,
    Dual,
    FirstOrder,
    GivenObjective,
    LowRank,
    Objective,
    Solver,
)
from corn.covariance import design as solve
from corn.errors import FileFormatError, InvalidArgumentError
from corn.privacy import PrivacyBudget
from corn.privacy.budget import describe_range
from corn.privacy.rounding import round_bound_down
from corn.topology import Network
from corn.topology.files import read_matrix

SolverChoice: TypeAlias = Literal["auto", "dual", "closed-form", "first-order", "low-rank"]

EXAMPLE = "corn design --graph er:n=20,p=0.2,seed=1 --epsilon 10 --steps 5000 --clip 0.1"


def design(
    *,
    graph: GraphOption,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mechanism: MechanismOption = "corn",
    mixing: MixingOptions,
    objective: Annotated[
        Path | None, typer.Option(help="Minimise Tr(A R) for the matrix A in this .npy or .csv.")
    ] = None,
    threat: ThreatOptions,
    drop_cost: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Relative increase of the noise energy up to which the weakest seeds are left "
            "out, so that agents draw fewer streams.",
        ),
    ] = 0.0,
    solver: Annotated[SolverChoice, typer.Option(help="Solver for corn.")] = "auto",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Relative gap to stop at. (Default: 1e-6; with insiders or shared seeds 1e-3, and "
            "1e-2 from 24 agents on.)"
        ),
    ] = None,
    max_noise_std: Annotated[
        float | None,
        typer.Option(help="Bound on an agent's noise std. (Default: 32 × an LDP agent's.)"),
    ] = None,
    ridge: Annotated[float, typer.Option(min=0, help="Penalty on noise power.")] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes for disjoint groups.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Save everything to this .json, or the covariance to this .npy."),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Choose the noise that agents draw jointly, and bound its distance from the optimum."""
    # Before the design, which may take minutes.
    if out and out.suffix not in (".json", ".npy"):
        raise FileFormatError(f"{out}: a design's file must end in .json or .npy")
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
    target: Objective = mixing.choose_objective(network, budget.steps)
    if objective:
        target = GivenObjective(read_matrix(objective, name="an objective"))
    options = Corn(
        solver=_choose_solver(solver, tolerance),
        max_noise_std=max_noise_std,
        ridge=ridge,
        drop_cost=drop_cost,
        num_workers=jobs,
    )
    # Any candidate can be scaled to the caps, so Ctrl-C may keep the best one so far.
    with designing(keep_best=True):
        result = solve(
            network,
            promise,
            mechanism=choose_mechanism(mechanism, options),
            objective=target,
            threat=threat.make_if_given(),
        )
    facts = design_facts(network, promise, target, result)
    facts["cooldown_steps"] = mixing.choose_cooldown(network, budget.steps)
    if plot:
        _draw(network, result, target, plot)
    if out:
        _save(facts, result, out)
    # References have no precision, and no guarantee that insiders could weaken.
    if result.precision is not None:
        warn_of_insiders(result.decomposition, promise, result.threat, mechanism=result.mechanism)
    if (
        result.mechanism == "corn"
        and network.num_agents > 1
        # The best design shares no seed at all, which is probably not what the user expected.
        and not result.decomposition.seed_groups
    ):
        print_note(
            f"{result.threat.describe_seeds()} with {result.threat.describe_colluders()}: shared "
            "noise does not help, so every agent draws its own (LDP); try --seeds pairs"
        )
    if json:
        print_json(facts)
    else:
        _print(promise, network, target, result, mixing.describe(network, budget.steps))
        print_written(plot, out)
    raise_if_interrupted(result)


def _choose_solver(name: SolverChoice, tolerance: float | None) -> Solver:
    if name == "closed-form":
        if tolerance is not None:
            raise InvalidArgumentError(
                "--tolerance does not apply to --solver closed-form, which is exact: leave it out"
            )
        return ClosedForm()
    if name == "auto":
        return Auto(tolerance)
    named: dict[str, type[Dual] | type[FirstOrder] | type[LowRank]] = {
        "dual": Dual,
        "first-order": FirstOrder,
        "low-rank": LowRank,
    }
    solver = named[name]
    # Each solver has a default of its own, so None must not be passed on.
    return solver() if tolerance is None else solver(tolerance)


def design_facts(
    network: Network,
    budget: PrivacyBudget,
    objective: Objective,
    result: Design,
) -> dict[str, object]:
    """Return all facts about a design, for JSON."""
    threat = result.threat
    streams = result.decomposition.count_streams()
    return {
        "graph": network.source,
        "num_agents": network.num_agents,
        "weights": network.weights,
        "gossip": str(network.gossip),
        "budget": {
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "num_steps": budget.num_steps,
            "clip": budget.clip,
            "unit": budget.unit,
            "accounting": budget.accounting,
            "adjacency": budget.adjacency,
            "batch_size": budget.batch_size,
            "sampling": budget.sampling,
            "sampling_rate": budget.sampling_rate,
            "samples_per_agent": budget.samples_per_agent,
            "promise": budget.describe(),
        },
        "adversary": result.adversary,
        "objective": objective.describe(),
        "mechanism": result.mechanism,
        "seeds": threat.seeds,
        "max_colluders": threat.max_colluders,
        "private_noise": threat.private_noise,
        "solver": result.solver,
        "status": result.status,
        "iterations": result.iterations,
        "num_coalitions": result.num_coalitions,
        "precision_caps": result.precision_caps,
        "value": result.value,
        "lower_bound": result.lower_bound,
        "normalized_value": result.normalized_value,
        "normalized_lower_bound": result.normalized_lower_bound,
        "gap": result.gap,
        "average_noise_variance": result.average_noise_variance,
        "central_ratio": result.central_ratio,
        "weighted_central_ratio": result.weighted_central_ratio,
        "noise_std": result.noise_std,
        "independent_variance": result.independent_variance,
        "max_streams": max(streams),
        "streams": streams,
        "num_seed_groups": len(result.decomposition.seed_groups),
        "dropped_seed_groups": result.num_dropped_groups,
        "value_before_dropping": result.value_before_dropping,
        "covariance": result.covariance,
    }


def _print(
    budget: PrivacyBudget,
    network: Network,
    objective: Objective,
    result: Design,
    described_mixing: str,
) -> None:
    ldp_std = 1 / np.sqrt(result.precision_caps)
    streams = result.decomposition.count_streams()
    facts = [
        ("promise", budget.describe()),
        *strictest_facts(budget, network.num_agents),
        ("against", result.adversary),
        ("minimises", f"Tr(A R), {objective.describe()}"),
        ("status", f"{result.status} ({result.solver}, {result.iterations} iterations)"),
        ("value", f"{result.value:.6g}   (× strictest cap: {result.normalized_value:.6g})"),
        ("lower bound", f"{round_bound_down(result.lower_bound)}   (gap {result.gap:.2g})"),
        (
            "noise std of an agent",
            f"{describe_range(result.noise_std, digits=4)}   "
            f"(LDP {describe_range(ldp_std, digits=4)})",
        ),
        (
            "noise in the average",
            f"{result.average_noise_variance:.4g}   "
            f"({describe_average(result.central_ratio, result.weighted_central_ratio, budget)})",
        ),
        ("mixing", described_mixing),
        ("split σ_mix² I + R_cor", f"σ_mix² = {result.independent_variance:.6g}"),
        (
            "seeds",
            f"{len(result.decomposition.seed_groups)} shared, {min(streams)} to {max(streams)} "
            "streams per agent",
        ),
    ]
    if result.num_coalitions is not None:
        after = [name for name, _ in facts].index("against") + 1
        facts.insert(after, ("coalitions checked", f"{result.num_coalitions:,}"))
    if result.value_before_dropping is not None and result.num_dropped_groups:
        facts.append(
            (
                "dropped",
                f"{result.num_dropped_groups} weak seeds, at a cost of "
                f"{result.value / result.value_before_dropping - 1:.2%} in value",
            )
        )
    print_facts(f"{result.mechanism} on {network.source}, {network.num_agents} agents", facts)


def _save(facts: dict[str, object], result: Design, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npy":
        np.save(out, result.covariance)
        return
    parts = result.decomposition
    shares = {
        "private_variance": parts.private_variance,
        "seed_groups": parts.seed_groups,
        "factors": parts.factors,
    }
    save_json({**facts, "decomposition": shares}, out)


def _draw(network: Network, result: Design, objective: Objective, path: Path) -> None:
    from corn.report import plot_design, save_figure

    title = (
        f"{result.mechanism}, {objective.describe()}: "
        f"{result.central_ratio:.3g} × the noise of central DP in the average"
    )
    save_figure(plot_design(network, result, title=title), path)
