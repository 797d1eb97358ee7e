"""``corn compare``: all mechanisms on one network, for one step and for accumulated noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from corn.arrays import FloatArray
from corn.cli.budget_options import BatchSizeOption, BudgetOptions
from corn.cli.options import GraphOption, JsonOption, MixingOptions, PlotOption, ThreatOptions
from corn.cli.output import (
    KAPPA,
    format_kappa,
    print_facts,
    print_json,
    print_table,
    print_written,
    warn_of_insiders,
    warn_of_large_disagreement,
)
from corn.cli.strictest import (
    StrictestPromise,
    describe_reference,
    find_strictest,
    list_agents,
    strictest_facts,
)
from corn.cli.watching import designing
from corn.covariance import (
    EAVESDROPPER,
    ONE_STEP,
    Design,
    Horizon,
    MechanismName,
    OwnMechanism,
    ThreatModel,
    design,
    read_mechanism,
)
from corn.covariance.disagreement import disagreement_ratio
from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget
from corn.topology import Network

EXAMPLE = "corn compare --graph er:n=20,p=0.2,seed=1 --plot noise.png"
COMPARED: tuple[MechanismName, ...] = ("ldp", "zero-sum", "decor", "corn", "central", "none")
ONE_STEP_DESIGN = "corn one-step"
"""CorN designed for one step but judged by accumulated noise: the cost of the paper's design."""
EAVESDROPPER_DESIGN = "corn eavesdropper"
"""CorN against an eavesdropper alone: comparable to DECOR and zero-sum noise, unlike CorN's row."""
_EAVESDROPPER_ROWS = ("zero-sum", "decor", EAVESDROPPER_DESIGN)
# A mechanism of the user's own under one of these names would replace a row.
_TAKEN = (*COMPARED, ONE_STEP_DESIGN, EAVESDROPPER_DESIGN)
_REFERENCES = ("central", "none")


class CostOfStrictest(NamedTuple):
    """The noise energy with the strictest promise relaxed, and the ratio of promised to it."""

    relaxed_value: float
    ratio: float


def compare(
    *,
    graph: GraphOption,
    budget: BudgetOptions,
    batch_size: BatchSizeOption = None,
    mixing: MixingOptions,
    threat: ThreatOptions,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE",
            help="One more row: NAME=R.npy, a covariance, or NAME=FILE.py:FUNCTION, a function "
            "from mixing matrix and precision caps to a covariance; scaled to the budget. "
            "Can be given several times.",
        ),
    ] = None,
    plot: PlotOption = None,
    json: JsonOption = False,
) -> None:
    """Compare all mechanisms at the same privacy, for one step and over a horizon.

    Rows are grouped by adversary. DECOR and zero-sum noise hold against no insider, so one row
    shows CorN against an eavesdropper; --colluders 0 compares all mechanisms against it.

    Where promises differ, a last table shows what the strictest costs each mechanism.
    """
    network = mixing.load_network(graph)
    promise = budget.make(batch_size, network)
    against = threat.make(network.num_agents)
    own = _read_own(mechanism or [])
    objectives = [ONE_STEP, mixing.choose_objective(network, budget.steps)]
    strictest = find_strictest(promise, network.num_agents)
    with designing():
        designs = {
            objective.describe(): _design_all(network, promise, objective, against, own)
            for objective in objectives
        }
        relaxed = {}
        if strictest is not None:
            caps = strictest.relaxed_caps
            # Caps in place of promises: only those of the strictest agents change.
            relaxed = _design_all(network, caps, objectives[-1], against, own)
    one_step, accumulated = (designs[objective.describe()] for objective in objectives)
    best = accumulated["corn"]
    if objectives[0] != objectives[1]:
        accumulated[ONE_STEP_DESIGN] = _judge(
            one_step["corn"], best, objectives[1], network, promise.num_steps
        )
    designs = {objective: _sort_rows(row, against) for objective, row in designs.items()}
    warn_of_insiders(best.decomposition, promise, best.threat, mechanism=best.mechanism)
    warn_of_large_disagreement(
        network,
        objectives[-1],
        best.disagreement_ratio,
        mechanism=best.mechanism,
        num_steps=promise.num_steps,
    )
    if plot:
        _draw(network, promise, against, designs, plot)
    costs = {
        name: CostOfStrictest(relaxed[name].value, own.value / relaxed[name].value)
        for name, own in accumulated.items()
        # No noise costs nothing under any promise, and its ratio would be 0/0.
        if name in relaxed and name != "none"
    }
    if json:
        print_json(_facts(network, promise, against, designs) | _cost_facts(strictest, costs))
        return
    _print(network, promise, against, designs)
    if strictest is not None:
        _print_costs(strictest, accumulated, costs, against)
    print_written(plot)


def _read_own(specs: Sequence[str]) -> dict[str, OwnMechanism]:
    """Return the user's own mechanisms by name."""
    found: dict[str, OwnMechanism] = {}
    for spec in specs:
        mechanism = read_mechanism(spec)
        if mechanism is None or mechanism.label in (*_TAKEN, *found):
            raise InvalidArgumentError(
                f"mechanism must be NAME=R.npy or NAME=FILE.py:FUNCTION with a new name, found "
                f"{spec!r}: {', '.join(COMPARED)} are compared anyway"
            )
        found[mechanism.label] = mechanism
    return found


def _design_all(
    network: Network,
    budget: PrivacyBudget | FloatArray,
    objective: Horizon,
    threat: ThreatModel,
    own: Mapping[str, OwnMechanism],
) -> dict[str, Design]:
    """Return each mechanism's design, against the threat or the weaker one it can hold against."""
    designs: dict[str, Design] = {
        name: design(
            network,
            budget,
            mechanism=name,
            objective=objective,
            # DECOR and zero-sum noise refuse insiders; left to themselves they name their threat.
            threat=threat if name in ("corn", "ldp") else None,
        )
        for name in COMPARED
    }
    for name, mechanism in own.items():
        # Without the threat: correlated noise from one seed holds against an eavesdropper only.
        designs[name] = design(network, budget, mechanism=mechanism, objective=objective)
    # Without insiders this row would repeat CorN's own.
    if threat.max_colluders:
        designs[EAVESDROPPER_DESIGN] = design(
            network, budget, objective=objective, threat=EAVESDROPPER
        )
    return designs


def _judge(made: Design, best: Design, objective: Horizon, network: Network, steps: int) -> Design:
    """Return a design for another objective with its value for this one, and the best's bound."""
    R = made.covariance
    return replace(
        made,
        value=float((objective.matrix(network.step_matrix) * R).sum()),
        lower_bound=best.lower_bound,
        disagreement_ratio=disagreement_ratio(
            network,
            R,
            precision_cap=made.strictest_cap,
            momentum=objective.momentum,
            num_steps=steps,
        ),
    )


def _sort_rows(designs: Mapping[str, Design], threat: ThreatModel) -> dict[str, Design]:
    """Return designs with those of one adversary next to each other, and CorN's last of them."""
    last = (ONE_STEP_DESIGN, "corn", EAVESDROPPER_DESIGN)
    order = [name for name in designs if name not in last] + [n for n in last if n in designs]
    # Sorting is stable, so that the order within a group stays.
    return {name: designs[name] for name in sorted(order, key=lambda n: _group_of(n, threat))}


def _group_of(name: str, threat: ThreatModel) -> int:
    """Return the number of a row's group: the threat, an eavesdropper alone, or no adversary.

    Less noise against a weaker adversary is no merit, so only values within a group compare.
    """
    if name in _REFERENCES:
        return 2
    is_weaker = name in _EAVESDROPPER_ROWS or name not in _TAKEN
    return 1 if threat.max_colluders and is_weaker else 0


def _facts(
    network: Network,
    budget: PrivacyBudget,
    threat: ThreatModel,
    designs: Mapping[str, Mapping[str, Design]],
) -> dict[str, object]:
    return {
        "graph": network.source,
        "num_agents": network.num_agents,
        "weights": network.weights,
        "gossip": str(network.gossip),
        "promise": budget.describe(),
        "adversary": threat.describe(),
        "precision_caps": budget.precision_caps(network.num_agents),
        "objectives": {
            objective: {
                name: {
                    "value": result.value,
                    "normalized_value": result.normalized_value,
                    "ratio_to_ldp": result.value / row["ldp"].value,
                    "ratio_to_central": result.value / row["central"].value,
                    "central_ratio": result.central_ratio,
                    "weighted_central_ratio": result.weighted_central_ratio,
                    "disagreement_ratio": result.disagreement_ratio,
                    "adversary": result.adversary,
                    "normalized_lower_bound": result.normalized_lower_bound,
                    "gap": result.gap,
                    "status": _name_status(name, result),
                    "max_noise_std": float(result.noise_std.max()),
                }
                for name, result in row.items()
            }
            for objective, row in designs.items()
        },
    }


def _print(
    network: Network,
    budget: PrivacyBudget,
    threat: ThreatModel,
    designs: Mapping[str, Mapping[str, Design]],
) -> None:
    from corn.report.style import MECHANISM_NAMES

    is_gossip = network.mixing == "gossip"
    print_facts(
        f"{network.source}, {network.num_agents} agents, {network.weights} weights",
        [
            ("promise", budget.describe()),
            *strictest_facts(budget, network.num_agents),
            ("against", "an eavesdropper who sees every message, and insiders as listed"),
            ("average × server", describe_reference(budget)),
            *([("κ", KAPPA)] if is_gossip else []),
            ("gossip", f"{network.gossip} in each step"),
        ],
    )
    for objective, row in designs.items():
        groups = [_group_of(name, threat) for name in row]
        print_table(
            f"Noise energy Tr(A R): {objective}",
            [
                "mechanism",
                "value",
                "× LDP",
                "average × server",
                "κ" if is_gossip else "",
                "above the best",
                "status",
                "holds against",
            ],
            [
                [
                    MECHANISM_NAMES.get(name, name),
                    f"{result.value:.5g}",
                    f"{result.value / row['ldp'].value:.4f}",
                    f"{result.central_ratio:.3f}",
                    format_kappa(result.disagreement_ratio),
                    _format_gap(name, row),
                    _name_status(name, result),
                    _name_adversary(result, threat),
                ]
                for name, result in row.items()
            ],
            section_ends=[k for k in range(len(groups) - 1) if groups[k] != groups[k + 1]],
        )


def _cost_facts(
    strictest: StrictestPromise | None, costs: Mapping[str, CostOfStrictest]
) -> dict[str, object]:
    if strictest is None:
        return {}
    return {
        "strictest": {
            "agents": strictest.agents,
            "promise": strictest.promise,
            "relaxed_promise": strictest.relaxed,
            "costs": {name: cost._asdict() for name, cost in costs.items()},
        }
    }


def _print_costs(
    strictest: StrictestPromise,
    designs: Mapping[str, Design],
    costs: Mapping[str, CostOfStrictest],
    threat: ThreatModel,
) -> None:
    from corn.report.style import MECHANISM_NAMES

    print_table(
        f"Cost of the strictest promise: noise energy with {strictest.relaxed} for "
        f"{list_agents(strictest.agents)}",
        ["mechanism", "as promised", "relaxed", "cost of the strictest", "holds against"],
        [
            [
                MECHANISM_NAMES.get(name, name),
                f"{designs[name].value:.5g}",
                f"{cost.relaxed_value:.5g}",
                f"× {cost.ratio:.3f}",
                _name_adversary(designs[name], threat),
            ]
            for name, cost in sorted(costs.items(), key=lambda item: _group_of(item[0], threat))
        ],
    )


def _name_status(name: str, result: Design) -> str:
    return "other objective" if name == ONE_STEP_DESIGN else result.status


def _format_gap(name: str, designs: Mapping[str, Design]) -> str:
    """Return the distance of a row from the best against its adversary."""
    result = designs[name]
    if result.status == "reference":
        return ""
    gap = result.gap
    if name == "ldp":
        # LDP's own bound is that of an eavesdropper. CorN's, against the same insiders, is higher,
        # and holds for LDP too: noise without seeds is a split over any seeds.
        gap = min(gap, max(result.value / designs["corn"].lower_bound - 1, 0.0))
    return f"{gap:.1e}" if gap < 1e-3 else f"{gap:.1%}"


def _name_adversary(result: Design, threat: ThreatModel) -> str:
    """Return the adversary of a row in two words; LDP shares no seed that insiders could know."""
    if result.status == "reference":
        return "nobody"
    if result.mechanism == "ldp":
        return "any insiders"
    if result.threat.max_colluders:
        return result.threat.describe_colluders()
    return "eavesdropper only" if threat.max_colluders else "eavesdropper"


def _draw(
    network: Network,
    budget: PrivacyBudget,
    threat: ThreatModel,
    designs: Mapping[str, Mapping[str, Design]],
    path: Path,
) -> None:
    from corn.report import plot_comparison, save_figure

    drawn = {
        objective: {name: result.value for name, result in row.items() if name != "none"}
        for objective, row in designs.items()
    }
    adversaries = {
        name: f"holds against {_name_adversary(result, threat)}"
        for row in designs.values()
        for name, result in row.items()
    }
    title = f"{network.source}: {budget.describe()}"
    figure = plot_comparison(drawn, objectives=list(drawn), title=title, remarks=adversaries)
    save_figure(figure, path)
