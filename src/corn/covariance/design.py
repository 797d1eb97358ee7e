"""The entry point: a network, a budget and a mechanism make one certified design.

Where every agent gets the exact sum of a step's releases, noise that cancels in the sum costs
nothing, so it can be infinite: masks, uniform on the grid. What remains is private noise. With n
agents of which q collude, variance θ = 1/((n − q) b) each is enough, because the honest agents'
private noise adds up to 1/b. No arrangement of seeds does better (docs/theory.md, "Exact mixing").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, cast, final

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from corn.checks import FloatArray, as_square_matrix, as_symmetric_matrix, require, require_choice
from corn.covariance.baselines import CovarianceRule, Decor, Ldp, OwnMechanism, Reference, ZeroSum
from corn.covariance.coalitions import worst_precisions
from corn.covariance.decomposition import Decomposition
from corn.covariance.dual import design_groups
from corn.covariance.insiders import solve_split
from corn.covariance.objective import (
    GivenObjective,
    Objective,
    ObjectiveLike,
    default_objective,
    disagreement_ratio,
    energy_of_average,
)
from corn.covariance.problem import Design, DesignProblem, MechanismName, conclude, expand_caps
from corn.covariance.threat import DEFAULT_THREAT, EAVESDROPPER, SeedGroups, ThreatModel
from corn.errors import FileFormatError, InfeasibleError, InvalidArgumentError
from corn.files import load_function
from corn.privacy import PrivacyBudget
from corn.topology import Network, load_network
from corn.topology.files import read_matrix
from corn.topology.graphs import Graph
from corn.topology.mixing import graph_of


class Mechanism(Protocol):
    """A rule that correlates noise across agents, with the options of that rule."""

    @property
    def name(self) -> MechanismName:
        """The mechanism's name in results and on the command line."""
        ...

    @property
    def default_threat(self) -> ThreatModel:
        """The stronger of `DEFAULT_THREAT` and `EAVESDROPPER` that the mechanism holds against."""
        ...

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best noise of this mechanism, or raise if the threat is too much for it."""
        ...


@final
@dataclass(frozen=True)
class Corn:
    """CorN: any covariance that the threat's seeds allow, with a certificate of optimality.

    The exact dual solves the problem where seed groups are disjoint and nobody colludes
    (`corn.covariance.dual`), a first-order method elsewhere (`corn.covariance.insiders`).

    Attributes:
        max_noise_std: a bound on √R_ii; None is 32/√b_i, which keeps float32 cancellation harmless;
            ``math.inf`` is no limit. The gap includes the cost of the limit.
    """

    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "corn"
    default_threat: ClassVar[ThreatModel] = DEFAULT_THREAT

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best noise on the seeds of the threat."""
        problem = replace(problem, max_noise_std=self.max_noise_std)
        groups = problem.threat.seed_groups(problem.graph)
        if needs_independent_noise(groups, problem.num_agents, problem.threat.max_colluders):
            R = np.diag(1 / problem.precision_caps)
            bound = float(np.trace(problem.scaled_objective)) / problem.strictest_cap
            made = conclude(problem, R, "corn", "formula", "optimal", lower_bound=bound)
            return replace(made, shares=Decomposition(made.covariance.diagonal()))
        if are_disjoint(groups):
            return design_groups(problem, groups)
        return solve_split(problem, groups)


def are_disjoint(groups: SeedGroups) -> bool:
    """Return whether no agent is in two groups: the problem then separates into their blocks."""
    members = [agent for group in groups for agent in group]
    return len(members) == len(set(members))


def needs_independent_noise(groups: SeedGroups, num_agents: int, max_colluders: int) -> bool:
    """Return whether insiders leave no better noise than LDP, on these seeds and for any objective.

    Where groups are disjoint, or one agent is left honest, an insider knows all noise that is
    shared with an agent, which needs private noise of variance 1/b_i.
    """
    return max_colluders > 0 and (are_disjoint(groups) or num_agents - max_colluders < 2)


_REFERENCES = Reference("central"), Reference("none"), Reference("unclipped")
_BY_NAME: dict[MechanismName, Mechanism] = {
    each.name: each for each in (Corn(), Decor(), Ldp(), ZeroSum(), *_REFERENCES)
}
MECHANISMS: tuple[MechanismName, ...] = tuple(_BY_NAME)

MechanismLike: TypeAlias = str | Mechanism | CovarianceRule
"""A name, ``NAME=R.npy``, ``NAME=FILE.py:FUNCTION``, a record such as `Corn` or `Decor`, or a
function that returns a covariance, shape (n, n), for a `DesignProblem`."""


def read_mechanism(given: MechanismLike) -> Mechanism:
    """Return the record of a mechanism."""
    if not isinstance(given, str):
        # A record is understood by its method, so that users' classes need no common base.
        if hasattr(given, "solve"):
            return cast("Mechanism", given)
        rule = f"one of {', '.join(MECHANISMS)}, a record, or a function of a design problem"
        require(callable(given), "mechanism", rule, repr(given))
        return OwnMechanism(given, getattr(given, "__name__", "own"))
    label, equals, source = given.partition("=")
    if not equals:
        advice = "your own is a function, or in text NAME=R.npy or NAME=FILE.py:FUNCTION"
        name = cast("MechanismName", given)
        return _BY_NAME[require_choice("mechanism", name, MECHANISMS, advice=advice)]
    # With a comma in it, a list of names would pass for the name of one mechanism.
    if not label or not source or "," in label:
        raise FileFormatError(
            f"mechanism must be NAME=R.npy or NAME=FILE.py:FUNCTION, found {given!r}"
        )
    if ".py:" in source:
        return OwnMechanism(load_function(source), label)
    return OwnMechanism(read_matrix(Path(source), name="a covariance"), label)


def read_mechanisms(
    given: str | Sequence[Any] | Mapping[str, Any], *, ready: tuple[type, ...] = ()
) -> dict[str, Any]:
    """Return several mechanisms by the names that tables show, each different.

    Names in one text are separated by commas. A mapping has names of the caller's choice. Objects
    of the types ``ready`` stay as they are; all others become records.
    """
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",")]
    require(len(given) > 0, "mechanism", "at least one", "none")
    listed = given.values() if isinstance(given, Mapping) else given
    read = [each if isinstance(each, ready) else read_mechanism(each) for each in listed]
    labels = list(given) if isinstance(given, Mapping) else []
    for each in read if not labels else ():
        names = (getattr(each, name, None) for name in ("label", "name", "mechanism"))
        labels.append(next((name for name in names if isinstance(name, str)), "own"))
    for label, mechanism in zip(labels, read, strict=True):
        is_new = not isinstance(mechanism, OwnMechanism) or label not in MECHANISMS
        require(is_new, "mechanism", "a new name for one of your own", repr(label))
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    advice = "give a mapping from names to mechanisms"
    found = f"{', '.join(repeated)} twice"
    require(not repeated, "mechanism", "different names", found, advice=advice)
    return dict(zip(labels, read, strict=True))


def design(
    network: Network | str | Path | nx.Graph | ArrayLike,
    budget: PrivacyBudget | ArrayLike,
    *,
    mechanism: MechanismLike = "corn",
    objective: ObjectiveLike | None = None,
    threat: ThreatModel | None = None,
) -> Design:
    """Choose the covariance R of the noise across agents: Problems (13) and (16) of the paper.

    The result minimises Tr(A R) within its mechanism, with [R⁻¹]_ii ≤ b_i for every agent, checked
    by an independent Cholesky inverse. For every private mechanism ``lower_bound`` bounds the best
    of *all* covariances under the caps: DECOR's gap, say, is its distance from the optimum.

    Args:
        network: a network, a spec or file, a graph, or the mixing matrix W of a step, shape (n, n),
            which must be symmetric. Seeds follow its links. Where a network sums releases
            exactly (``mixing="sum"``), CorN's noise is optimal in closed form.
        budget: the promises, or the precision caps that promises lead to: one number b for all
            agents, or b_i of each agent, shape (n,).
        mechanism: the name of a mechanism; a record of one with its options, such as `Corn`; or a
            function of your own, which returns a covariance R for a `DesignProblem`. R is scaled
            until it meets the caps exactly.
        objective: what to minimise: `Horizon`, `FiniteRun`, a positive semidefinite matrix A of
            shape (n, n), or a function that returns A for the mixing matrix of a step. The default
            is `default_objective` of the budget's steps; a precision cap has no number of steps, so
            an objective must be given with it. For exact sums CorN's noise is the same for all.
        threat: the adversary and the seeds; by default one insider and seeds of pairs, and
            an eavesdropper for DECOR and zero-sum noise, which hold against no insider. The
            design's ``threat`` has the answer; an explicit threat is never weakened but refused.

    >>> from corn.covariance import ONE_STEP
    >>> result = design("complete:4", 2.0, mechanism="ldp", objective=ONE_STEP)
    >>> round(result.value, 6), result.status, result.noise_std.round(3)
    (0.5, 'family optimum', array([0.707, 0.707, 0.707, 0.707]))
    """
    mechanism = read_mechanism(mechanism)
    if isinstance(network, str | Path | nx.Graph):
        network = load_network(network)
    is_sum = isinstance(network, Network) and network.mixing == "sum"
    W, graph = _read_network(network)
    n = len(graph)
    if threat is None:
        # A single agent has nobody inside the network to fear.
        threat = mechanism.default_threat if n > 1 else EAVESDROPPER
    if isinstance(budget, PrivacyBudget):
        num_steps, caps = budget.num_steps, budget.precision_caps(n)
    else:
        num_steps, caps = None, expand_caps(budget, n)
    objective = read_objective(objective, network, num_steps)
    if is_sum and isinstance(mechanism, Corn):
        require_no_options(mechanism)
        return _design_for_sums(graph, caps, objective, threat)
    A = objective.matrix(W)
    if is_sum:
        # Exact sums leave noise in the average alone, whatever else a given matrix weighs.
        A = np.full(A.shape, energy_of_average(objective, n) / n)
    # Results and plans must name the seeds that were used, not "auto".
    threat = threat.resolve(graph)
    made = mechanism.solve(DesignProblem(A, caps, graph, threat, mixing_matrix=W))
    if not isinstance(network, Network) or not isinstance(budget, PrivacyBudget):
        return made
    ratio = disagreement_ratio(
        network,
        made.covariance,
        precision_cap=made.strictest_cap,
        momentum=objective.momentum,
        num_steps=budget.num_steps,
    )
    # A trusted server has one model, also where agents would never agree.
    return replace(made, disagreement_ratio=0.0 if made.status == "reference" else ratio)


def read_objective(
    given: ObjectiveLike | None, network: Network | ArrayLike, num_steps: int | None
) -> Objective:
    """Return the record of an objective, of which None is the default for a number of steps."""
    if given is None:
        # One step is no default: noise designed for it accumulates to several times the optimum.
        if num_steps is None:
            raise InvalidArgumentError(
                "objective must be given with a precision cap, which has no number of steps: give "
                "objective=Horizon(length), or a PrivacyBudget instead of the cap"
            )
        mixing = network.mixing if isinstance(network, Network) else "gossip"
        return default_objective(num_steps, mixing=mixing)
    if isinstance(given, Objective):
        return given
    A = given(_read_network(network)[0]) if callable(given) else given
    return GivenObjective(as_square_matrix(A, name="objective"))


def _design_for_sums(
    graph: Graph, caps: FloatArray, objective: Objective, threat: ThreatModel
) -> Design:
    """Return masks and private noise, which are optimal where releases are summed exactly."""
    n = len(graph)
    threat = threat.resolve(graph, "sum")
    noise = design_masks(caps, threat.seed_groups(graph, "sum"), threat.max_colluders)
    energy = energy_of_average(objective, n) / n
    bound = energy * least_variance(n, float(caps.min()), threat.max_colluders)
    value = energy * noise.total_variance
    R, bound = noise.covariance, min(bound, value)
    made = Design("corn", "formula", "optimal", R, caps, value, bound, threat=threat)
    return replace(made, shares=noise, disagreement_ratio=0.0)


def design_masks(
    precision_caps: FloatArray, seed_groups: SeedGroups, max_colluders: int
) -> Decomposition:
    """Return masks on these seeds and the least private noise that keeps the strictest cap.

    For every coalition I of ``max_colluders`` agents, the masks of the other agents H make their
    messages uniform given their sum, which has private noise of variance at least 1/min b. Raises
    ``InfeasibleError`` unless the seeds that I does not know join all of H.
    """
    n = len(precision_caps)
    cap = float(precision_caps.min())
    # Rounded up, beyond the allowance of the check for its own rounding.
    theta = (1 + 1e-14 * n) / ((n - max_colluders) * cap)
    noise = Decomposition(np.full(n, theta), seed_groups, is_masked=True)
    if not (worst_precisions(noise, max_colluders) <= precision_caps).all():
        raise InfeasibleError(
            f"seeds must join all agents that are left without any {max_colluders} of them, found "
            f"{len(seed_groups)} seed groups that do not: use --seeds pairs or partners:K with a "
            "larger K, or fewer insiders"
        )
    return noise


def least_variance(num_agents: int, precision_cap: float, max_colluders: int) -> float:
    """Return the least 1ᵀR1 of any noise on any seeds: n/((n − q) b).

    Noise that a coalition does not know must have a sum of variance at least 1/b. A random
    coalition does not know a seed group with probability at most (n − q)/n, so that on average it
    does not know more than this part of 1ᵀR1.
    """
    return num_agents / ((num_agents - max_colluders) * precision_cap)


def require_no_options(mechanism: Corn) -> None:
    """Raise if CorN has a limit of noise, which the formula for exact sums does not use."""
    rule = "Corn() without options for exact sums, whose optimum is a formula"
    advice = "options are for mixing='gossip' (--mixing gossip)"
    require(mechanism == Corn(), "mechanism", rule, mechanism, advice=advice)


def _read_network(network: Network | ArrayLike) -> tuple[FloatArray, Graph]:
    """Return the matrix of a step and the links: of a matrix, where weights are not zero."""
    if isinstance(network, Network):
        # Its graph may have links without weight, whose agents can share a seed all the same.
        return network.step_matrix, network.graph
    W = as_symmetric_matrix(network, name="network")
    return W, graph_of(W)
