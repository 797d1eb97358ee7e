"""The entry point: a network, a budget and a mechanism make one certified design."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, cast, final

import networkx as nx
import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike

from corn.checks import (
    FloatArray,
    as_square_matrix,
    require,
    require_choice,
    require_positive,
)
from corn.covariance.baselines import (
    Central,
    CovarianceRule,
    Decor,
    Ldp,
    NoNoise,
    OwnMechanism,
    ZeroSum,
)
from corn.covariance.certificate import SplitSolution
from corn.covariance.coalitions import require_few_coalitions
from corn.covariance.decomposition import split_blocks
from corn.covariance.disagreement import disagreement_ratio
from corn.covariance.dual import Dual, solve_dual
from corn.covariance.feasibility import expand_caps, invert_covariance
from corn.covariance.first_order import FirstOrder
from corn.covariance.low_rank import LowRank, fits_pairs
from corn.covariance.masks import design_masks, least_variance, whole_precision
from corn.covariance.objective import (
    GivenObjective,
    Objective,
    ObjectiveLike,
    default_objective,
    energy_of_average,
)
from corn.covariance.problem import Design, DesignProblem, MechanismName, SolverName, Status
from corn.covariance.threat import DEFAULT_THREAT, EAVESDROPPER, SeedGroups, ThreatModel
from corn.errors import FileFormatError, InvalidArgumentError
from corn.files import load_function
from corn.privacy import PrivacyBudget
from corn.topology import Network, load_network
from corn.topology.files import read_matrix
from corn.topology.graphs import Graph
from corn.topology.mixing import graph_of

_SINGULAR = 1e-12  # smallest eigenvalue of A, relative to the largest
_SMALLEST_RIDGE = 1e-6
# Any point of the dual is a bound, so it need not converge.
_BOUND_ITERATIONS = 30


class SplitSolver(Protocol):
    """A solver of Problem (16), which chooses private noise and the noise of groups together."""

    @property
    def name(self) -> SolverName:
        """The solver's name in results."""
        ...

    @property
    def shortfall(self) -> Status:
        """The status of a solution whose gap is beyond the tolerance."""
        ...

    def solve_split(self, problem: DesignProblem, seed_groups: SeedGroups) -> SplitSolution:
        """Return a split that every coalition of the threat leaves under the cap."""
        ...


def design_against_insiders(
    problem: DesignProblem, seed_groups: SeedGroups, *, solver: SplitSolver
) -> Design:
    """Minimise Tr(A R) over private noise and the noise of each seed group: Problem (16).

    Every coalition of the problem's threat meets the caps, exactly.
    """
    # Before a search of hours whose result could not be checked.
    require_few_coalitions(problem.num_agents, problem.threat.max_colluders)
    final, limited = _solve_within_noise_limit(problem, seed_groups, solver)
    # Insiders only ask for more noise, so the bound against an eavesdropper holds as well. It is
    # the better one where A is singular on a seed group: the bound for insiders is then 0.
    dual = solve_dual(problem.scaled_objective, tolerance=1e-6, max_iterations=_BOUND_ITERATIONS)
    eavesdropper_bound = dual.lower_bound / problem.strictest_cap
    bound = min(max(final.lower_bound, eavesdropper_bound), final.value)
    status: Status = "noise limited" if limited else solver.shortfall
    if final.value <= (1 + final.tolerance) * bound:
        status = "optimal"
    elif final.lower_bound < eavesdropper_bound:
        status = "loose bound"
    R = final.decomposition.covariance
    precision, factor = invert_covariance(R)
    return Design(
        mechanism="corn",
        solver=solver.name,
        status=status,
        covariance=R,
        precision=precision,
        factor=factor,
        precision_caps=problem.precision_caps,
        value=final.value,
        lower_bound=bound,
        iterations=final.evaluations,
        threat=problem.threat,
        shares=final.decomposition,
        num_coalitions=final.num_coalitions,
        multipliers=final.multipliers,
    )


def _solve_within_noise_limit(
    problem: DesignProblem, seed_groups: SeedGroups, solver: SplitSolver
) -> tuple[SplitSolution, bool]:
    """Return a solution without noise above the limit, and whether that needed a ridge on A."""
    limits = problem.variance_ratio_limits / problem.precision_caps
    ridge = problem.ridge
    # With an A that is singular on a group, noise grows without bound and no bound is proved.
    if _is_singular_on_a_group(problem.scaled_objective, seed_groups):
        ridge = max(ridge, _SMALLEST_RIDGE)
    while True:
        solution = solver.solve_split(replace(problem, ridge=ridge), seed_groups)
        is_within = (solution.decomposition.covariance.diagonal() <= limits * (1 + 1e-9)).all()
        if is_within:
            return solution, ridge > 0
        # Noise variance falls about as the root of the ridge, and each solve is expensive.
        ridge = max(10 * ridge, _SMALLEST_RIDGE)


def _is_singular_on_a_group(A: FloatArray, seed_groups: SeedGroups) -> bool:
    by_size: dict[int, list[tuple[int, ...]]] = {}
    for group in seed_groups:
        by_size.setdefault(len(group), []).append(group)
    for groups in by_size.values():
        members = np.array(groups)
        values = np.linalg.eigvalsh(A[members[:, :, None], members[:, None, :]])
        if (values[:, 0] <= _SINGULAR * values[:, -1]).any():
            return True
    return False


# From best to worst: a design is as good as its worst block.
_STATUS_ORDER: tuple[Status, ...] = (
    "optimal",
    "accuracy limit",
    "noise limited",
    "iteration limit",
)
_MOST_AGAINST_INSIDERS = 5000  # agents: beyond it a design takes days, and tens of gigabytes
_LEAST_FOR_UPDATES = 24  # agents: below it FirstOrder is fast, and its bound tighter


class Mechanism(Protocol):
    """A rule that correlates noise across agents, with the options of that rule.

    ``default_threat`` is the strongest of `DEFAULT_THREAT` and `EAVESDROPPER` that the mechanism
    holds against.
    """

    @property
    def name(self) -> MechanismName:
        """The mechanism's name in results and on the command line."""
        ...

    @property
    def default_threat(self) -> ThreatModel:
        """The threat that a design holds against unless another one is asked for."""
        ...

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best noise of this mechanism, or raise if the threat is too much for it."""
        ...


@final
@dataclass(frozen=True)
class Auto:
    """The default solver.

    `Dual` where the problem separates into blocks, `LowRank` for seeds of pairs from 24 agents on,
    and `FirstOrder` elsewhere.

    ``tolerance`` is the relative gap to stop at; None is the default of the solver chosen.
    """

    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            require_positive("tolerance", self.tolerance)

    def choose(
        self, seed_groups: SeedGroups, threat: ThreatModel, num_agents: int
    ) -> Dual | FirstOrder | LowRank:
        """Return the solver for these seeds and this threat."""
        # FirstOrder takes any seeds and any threat; the other two are faster where they apply.
        solver: type[Dual] | type[FirstOrder] | type[LowRank] = FirstOrder
        if _separates(seed_groups, threat, num_agents):
            solver = Dual
        elif num_agents >= _LEAST_FOR_UPDATES and fits_pairs(seed_groups, threat):
            solver = LowRank
        return solver() if self.tolerance is None else solver(self.tolerance)


Solver: TypeAlias = Auto | Dual | FirstOrder | LowRank


@final
@dataclass(frozen=True)
class Corn:
    """CorN: any covariance that the threat's seeds allow, with a certificate of optimality.

    Attributes:
        solver: `Dual` where seed groups are disjoint and nobody colludes, `FirstOrder` anywhere,
            `LowRank` for seeds of pairs.
        max_noise_std: a bound on √R_ii; None is 32/√b_i, which keeps float32 cancellation harmless;
            ``math.inf`` is no limit. The gap includes the cost of the limit.
    """

    solver: Solver = Auto()
    max_noise_std: float | None = None
    name: ClassVar[MechanismName] = "corn"
    default_threat: ClassVar[ThreatModel] = DEFAULT_THREAT

    def solve(self, problem: DesignProblem) -> Design:
        """Return the best noise on the seeds of the threat."""
        problem = replace(problem, max_noise_std=self.max_noise_std)
        threat, solver = problem.threat, self.solver
        groups = threat.seed_groups(problem.graph)
        separates = _separates(groups, threat, problem.num_agents)
        if isinstance(solver, Auto):
            solver = solver.choose(groups, threat, problem.num_agents)
        # The caller may insist on a general solver, to compare it with the exact one.
        if separates and isinstance(solver, Dual):
            return self._solve_blocks(problem, groups, solver)
        if isinstance(solver, Dual):
            raise InvalidArgumentError(
                f"solver {type(solver).__name__} ({solver.name}) is for disjoint seed groups "
                f"against an eavesdropper, found seeds={threat.seeds!r:.60} and "
                f"max_colluders={threat.max_colluders}: use FirstOrder or Auto "
                "(--solver auto), or a threat without insiders (--colluders 0)"
            )
        return design_against_insiders(problem, groups, solver=solver)

    def _solve_blocks(self, problem: DesignProblem, groups: SeedGroups, solver: Dual) -> Design:
        """Return one block per group, and one for each agent that shares no seed."""
        n = problem.num_agents
        if groups == (tuple(range(n)),) or n == 1:
            return solver.solve(problem)
        # An agent in no group is a block of its own, with LDP noise.
        grouped = {agent for group in groups for agent in group}
        alone = tuple((agent,) for agent in range(n) if agent not in grouped)
        return design_blocks(problem, groups + alone, solver.solve)


_BY_NAME: dict[MechanismName, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        *(Corn(), Decor(), Ldp(), ZeroSum()),
        *(Central(), NoNoise(), NoNoise("unclipped")),
    )
}
MECHANISMS: tuple[MechanismName, ...] = tuple(_BY_NAME)

MechanismLike: TypeAlias = str | Mechanism | CovarianceRule
"""A name, ``NAME=R.npy``, ``NAME=FILE.py:FUNCTION``, a record such as `Corn` or `Decor`, or a
function that returns a covariance, shape (n, n), for a `DesignProblem`."""


def read_mechanism(given: MechanismLike) -> Mechanism:
    """Return the record of a mechanism.

    >>> read_mechanism("ldp")
    Ldp()
    """
    if not isinstance(given, str):
        # A record is understood by its method, so that users' classes need no common base.
        if hasattr(given, "solve"):
            return cast("Mechanism", given)
        is_rule = callable(given)
        rule = f"one of {', '.join(MECHANISMS)}, a record, or a function of a design problem"
        require(is_rule, "mechanism", rule, repr(given))
        return OwnMechanism(given, getattr(given, "__name__", "own"))
    label, equals, source = given.partition("=")
    if not equals:
        advice = "or NAME=R.npy, NAME=FILE.py:FUNCTION for one of your own"
        return _BY_NAME[
            require_choice("mechanism", cast("MechanismName", given), MECHANISMS, advice=advice)
        ]
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

    >>> list(read_mechanisms("corn, ldp")), list(read_mechanisms({"LDP": Ldp()}))
    (['corn', 'ldp'], ['LDP'])
    """
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",")]
    require(len(given) > 0, "mechanism", "at least one", "none")
    read = [
        each if isinstance(each, ready) else read_mechanism(each)
        for each in (given.values() if isinstance(given, Mapping) else given)
    ]
    labels = list(given) if isinstance(given, Mapping) else [label_of(each) for each in read]
    for label, mechanism in zip(labels, read, strict=True):
        is_new = not isinstance(mechanism, OwnMechanism) or label not in MECHANISMS
        require(is_new, "mechanism", "a new name for one of your own", repr(label))
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    require(
        not repeated,
        "mechanism",
        "different names",
        f"{', '.join(repeated)} twice",
        advice="give a mapping from names to mechanisms",
    )
    return dict(zip(labels, read, strict=True))


def label_of(mechanism: Any) -> str:
    """Return the name of a mechanism, or of a design, in tables."""
    labels = (getattr(mechanism, name, None) for name in ("label", "name", "mechanism"))
    return next((label for label in labels if isinstance(label, str)), "own")


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
            which need not be symmetric. Seeds follow its links. Where a network sums releases
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
    >>> strict = design("complete:4", [0.5, 2, 2, 2], mechanism="ldp", objective=ONE_STEP)
    >>> strict.noise_std.round(3)
    array([1.414, 0.707, 0.707, 0.707])
    >>> def neighbours(problem):
    ...     return np.eye(4) + 10 * nx.laplacian_matrix(problem.graph).toarray()
    >>> design("ring:4", 2.0, mechanism=neighbours, objective=ONE_STEP).status
    'given'
    """
    mechanism = read_mechanism(mechanism)
    if isinstance(network, str | Path | nx.Graph):
        network = load_network(network)
    num_steps = budget.num_steps if isinstance(budget, PrivacyBudget) else None
    objective = read_objective(objective, network, num_steps)
    if isinstance(network, Network) and network.mixing == "sum" and isinstance(mechanism, Corn):
        require_no_options(mechanism)
        return _design_for_sums(network, budget, objective, threat)
    W, graph = _read_network(network)
    if threat is None:
        # A single agent has nobody inside the network to fear.
        threat = mechanism.default_threat if len(graph) > 1 else EAVESDROPPER
    if isinstance(mechanism, Corn):
        require_feasible_size(len(graph), threat)
    problem = DesignProblem(
        objective_matrix=objective.matrix(W),
        precision_caps=_read_caps(budget, len(graph)),
        graph=graph,
        # Results and plans must name the seeds that were used, not "auto".
        threat=threat.resolve(graph),
        mixing_matrix=W,
    )
    made = mechanism.solve(problem)
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
                "objective must be given with a precision cap, which has no number of steps, found "
                "None: give objective=Horizon(length), or a PrivacyBudget instead of the cap"
            )
        mixing = network.mixing if isinstance(network, Network) else "gossip"
        return default_objective(num_steps, mixing=mixing)
    if isinstance(given, Objective):
        return given
    A = given(_read_network(network)[0]) if callable(given) else given
    return GivenObjective(as_square_matrix(A, name="objective"))


def _design_for_sums(
    network: Network,
    budget: PrivacyBudget | ArrayLike,
    objective: Objective,
    threat: ThreatModel | None,
) -> Design:
    """Return masks and private noise, which are optimal where releases are summed exactly."""
    n = network.num_agents
    if threat is None:
        threat = DEFAULT_THREAT if n > 1 else EAVESDROPPER
    threat = threat.resolve(network.graph, "sum")
    caps = _read_caps(budget, n)
    noise = design_masks(caps, threat.seed_groups(network.graph), threat.max_colluders)
    energy = energy_of_average(objective, n) / n
    bound = energy * least_variance(n, float(caps.min()), threat.max_colluders)
    return Design(
        mechanism="corn",
        solver="formula",
        status="optimal",
        covariance=noise.covariance,
        # The limit for masks: an eavesdropper learns the sum of all agents and nothing else.
        precision=np.full((n, n), whole_precision(noise, 0)),
        factor=np.diag(np.sqrt(noise.private_variance)),
        precision_caps=caps,
        value=energy * noise.total_variance,
        lower_bound=min(bound, energy * noise.total_variance),
        iterations=0,
        threat=threat,
        shares=noise,
        disagreement_ratio=0.0,
    )


def require_no_options(mechanism: Corn) -> None:
    """Raise if CorN has options of solvers, which the formula for exact sums does not use."""
    require(
        mechanism == Corn(),
        "mechanism",
        "Corn() without options for exact sums, whose optimum is a formula",
        mechanism,
        advice="options of solvers are for mixing='gossip' (--mixing gossip)",
    )


def require_feasible_size(num_agents: int, threat: ThreatModel) -> None:
    """Raise if a design against insiders would not end, before anything of its size is made."""
    if threat.max_colluders and num_agents > _MOST_AGAINST_INSIDERS:
        raise InvalidArgumentError(
            f"a design against insiders is for at most {_MOST_AGAINST_INSIDERS:,} agents, because "
            f"its time grows like their third power, found {num_agents:,}: --colluders 0 designs "
            "against an eavesdropper, and exact sums (--mixing sum) have no limit"
        )


def design_blocks(
    problem: DesignProblem, groups: SeedGroups, solve: Callable[[DesignProblem], Design]
) -> Design:
    """Design each disjoint group's block by itself, and join the blocks.

    With no seed shared across groups R is block-diagonal, so R⁻¹ is too: the caps bind in each
    block on its own, and the problem separates into the same problem on the diagonal blocks of A.
    Values and lower bounds add up exactly. Very large networks are designed that way.

    Agents whose noise nobody receives (a block of A that is zero) keep LDP noise. The gap is
    against the best block-diagonal covariance for these groups.
    """
    caps = problem.precision_caps
    # Tr(A R) of a block-diagonal R contains only the diagonal blocks of A.
    blocks = [problem.objective_matrix[np.ix_(group, group)] for group in groups]
    seen = [k for k, block in enumerate(blocks) if np.trace(block) > 0]
    problems = [
        replace(problem, objective_matrix=blocks[k], precision_caps=caps[list(groups[k])])
        for k in seen
    ]
    designs = [solve(block) for block in problems]
    solved = dict(zip(seen, designs, strict=True))
    # Blocks stand in the order of the groups; this permutation restores that of the agents.
    order = np.argsort(np.concatenate(groups))

    def join(unseen: FloatArray, part: Callable[[Design], FloatArray | None]) -> FloatArray:
        parts = [
            part(solved[k]) if k in solved else np.diag(unseen[list(group)])
            for k, group in enumerate(groups)
        ]
        return np.asarray(scipy.linalg.block_diag(*parts)[np.ix_(order, order)])

    covariance = join(1 / caps, lambda block: block.covariance)
    return replace(
        designs[0],
        status=max((block.status for block in designs), key=_STATUS_ORDER.index),
        covariance=covariance,
        precision=join(caps, lambda block: block.precision),
        factor=join(1 / np.sqrt(caps), lambda block: block.factor),
        precision_caps=caps,
        value=sum(block.value for block in designs),
        lower_bound=sum(block.lower_bound for block in designs),
        iterations=max(block.iterations for block in designs),
        shares=split_blocks(covariance, groups, precision_caps=caps),
    )


def _separates(groups: SeedGroups, threat: ThreatModel, num_agents: int) -> bool:
    """Return whether the problem separates into one block per seed group.

    It does not where groups overlap or insiders collude, nor where one private variance for all
    ties several blocks together.
    """
    members = [agent for group in groups for agent in group]
    is_tied = threat.private_noise == "common" and groups != (tuple(range(num_agents)),)
    return threat.max_colluders == 0 and len(members) == len(set(members)) and not is_tied


def _read_network(network: Network | ArrayLike) -> tuple[FloatArray, Graph]:
    """Return the matrix of a step and the links: of a matrix, where weights are not zero."""
    if isinstance(network, Network):
        # Its graph may have links without weight, whose agents can share a seed all the same.
        return network.step_matrix, network.graph
    W = as_square_matrix(network, name="network")
    return W, graph_of(W)


def _read_caps(budget: PrivacyBudget | ArrayLike, num_agents: int) -> FloatArray:
    if isinstance(budget, PrivacyBudget):
        return budget.precision_caps(num_agents)
    # A bool is a number to Python, and surely a mistake here, as is text that holds a number.
    if np.asarray(budget).dtype.kind not in "iuf":
        raise InvalidArgumentError(
            "budget must be a PrivacyBudget, or precision caps: one number for all agents, or an "
            f"array with one for each, found {type(budget).__name__}"
        )
    return expand_caps(budget, num_agents)
