"""Plan files: canonical JSON with a fingerprint; loading checks everything and executes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx
import numpy as np

from corn.checks import FloatArray, require, require_choice, require_count, require_length
from corn.covariance import (
    Decomposition,
    FiniteRun,
    GivenObjective,
    Horizon,
    MechanismName,
    ThreatModel,
)
from corn.covariance.threat import SeedGroups
from corn.errors import CornError, FileFormatError, InvalidArgumentError, make_printable
from corn.parsing import build, build_fields, quote, read_json
from corn.plan.plan import Certificate, FloatType, Plan
from corn.privacy import PrivacyBudget
from corn.topology import Gossip, Mixing, Network, name_of
from corn.topology.mixing import SparseMatrix, sparse_mixing_matrix

# Raised with every change of a plan's content. Fingerprints, and so keys, depend on the content.
SCHEMA = 7
Json: TypeAlias = dict[str, Any]
_MAX_REASON = 300
# Somebody else may have made a plan. These bound what reading it costs; plans for that many agents
# are far beyond what designs can be made for.
_MAX_BYTES = 1 << 26
_MOST_AGENTS = 5000
_FEW_GROUPS = 1000
# Exact sums need no matrices of n × n numbers.
_MOST_IN_SUMS = 200_000

_OBJECTIVES = {"horizon": Horizon, "finite run": FiniteRun, "given": GivenObjective}


def fingerprint(plan: Plan) -> bytes:
    """Return 32 bytes that identify the whole plan: SHA-256 of its canonical content."""
    return hashlib.sha256(_canonical(_encode(plan))).digest()


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan; plans with the same numbers, of the same types, give equal files.

    >>> import tempfile
    >>> from corn import PrivacyBudget, load_network, make_plan
    >>> budget = PrivacyBudget(epsilon=5, delta=1e-5, num_steps=100, clip=0.1)
    >>> plan = make_plan(load_network("ring:4"), budget)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan(plan, Path(folder) / "plan.corn")
    ...     load_plan(Path(folder) / "plan.corn").num_agents
    4
    """
    content = _encode(plan)
    text = _canonical(content)
    head = {"corn_plan": SCHEMA, "fingerprint": hashlib.sha256(text).hexdigest()}
    data = b'%s,\n"content":%s}\n' % (json.dumps(head).encode().removesuffix(b"}"), text)
    # Agents would refuse a larger file.
    advice = "plan with fewer seeds, such as --seeds sparse:8"
    require_count("the bytes of a plan", len(data), most=_MAX_BYTES, advice=advice)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def load_plan(path: Path | str) -> Plan:
    """Read a plan and check its form; :func:`~corn.plan.verify_plan` checks what it promises.

    Raises ``FileFormatError`` if it is missing, damaged, changed, or of another version.

    >>> load_plan(Path("missing.corn"))
    Traceback (most recent call last):
    corn.errors.FileFormatError: missing.corn: no such file
    """
    document = read_json(Path(path), kind="a plan", max_bytes=_MAX_BYTES)
    # Checked first: a plan of another version has other fields, and a list of them helps nobody.
    version = document.get("corn_plan") if isinstance(document, dict) else None
    if version != SCHEMA:
        raise FileFormatError(
            f"{path}: not a plan of version {SCHEMA}, which this version of CorN reads, found "
            f"{quote(version)}"
        )
    try:
        return _check_document(document)
    # A plan of too many agents for this machine's memory is refused too.
    except (CornError, ValueError, OverflowError, MemoryError) as error:
        why = make_printable(str(error), limit=_MAX_REASON)
        raise FileFormatError(f"{path}: not a valid plan: {why}") from error


def _check_document(document: Json) -> Plan:
    kinds = {"corn_plan": int, "fingerprint": str, "content": object}
    fields = build_fields(kinds, document, "the plan")
    _require_moderate(fields["content"])
    # Of the content as read, not of the parsed plan: a field that parsing would ignore must not go
    # unnoticed.
    content = _canonical(fields["content"])
    if hashlib.sha256(content).hexdigest() != fields["fingerprint"]:
        raise InvalidArgumentError("damaged or changed, its content has another fingerprint")
    plan = _decode(fields["content"])
    # One plan has one content: else agents with the same plan could have different fingerprints,
    # and with them different keys.
    if _canonical(_encode(plan)) != content:
        raise InvalidArgumentError("its content is not in canonical form")
    return plan


def _canonical(content: object) -> bytes:
    # Python writes the shortest digits that give the same float back, on every platform.
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def _encode(plan: Plan) -> Json:
    graph = plan.network.graph
    parts = plan.decomposition
    multipliers = plan.certificate.multipliers
    is_sum = plan.network.mixing == "sum"
    matrix = plan.network.sparse_matrix
    rows, columns = matrix.nonzero()
    values = np.asarray(matrix[rows, columns]).reshape(-1)
    places = zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)
    kind = next(kind for kind, record in _OBJECTIVES.items() if isinstance(plan.objective, record))
    objective = dataclasses.asdict(plan.objective)
    if isinstance(plan.objective, GivenObjective):
        objective["given"] = plan.objective.given.tolist()
    return {
        "corn_version": plan.corn_version,
        "network": {
            "source": plan.network.source,
            "weights": "none" if is_sum else plan.network.weights,
            # Always: the field stays until the format changes, as fingerprints depend on it.
            "directed": False,
            "agents": [name_of(graph, agent) for agent in range(plan.num_agents)],
            # Sorted, as networkx keeps the order of insertion, and equal plans must have equal
            # fingerprints.
            "links": sorted([int(i), int(j)] for i, j in graph.edges),
            # Sums have no use for weights, which would be half of a large plan.
            "mixing_weights": [] if is_sum else sorted(map(list, places)),
            "gossip": dataclasses.asdict(plan.network.gossip),
            "mixing": plan.network.mixing,
        },
        "budget": dataclasses.asdict(plan.budget),
        # Without ``asdict``, which copies each of a million seeds.
        "threat": {f.name: getattr(plan.threat, f.name) for f in dataclasses.fields(plan.threat)},
        "objective": {"kind": kind, **objective},
        "mechanism": plan.mechanism,
        "grid": plan.grid,
        "cooldown_steps": plan.cooldown_steps,
        "dtype": plan.dtype,
        # The noise weights as drawn, in float64, so that every agent checks the very numbers that
        # it uses.
        "decomposition": {
            "private_variance": parts.private_variance.tolist(),
            "seed_groups": parts.seed_groups,
            "factors": [] if parts.is_masked else [f.tolist() for f in parts.factors],
            "is_masked": parts.is_masked,
        },
        "certificate": {
            **dataclasses.asdict(plan.certificate),
            "multipliers": None if multipliers is None else multipliers.tolist(),
        },
    }


def _decode(content: object) -> Plan:
    hints = {
        "corn_version": str,
        "network": object,
        "budget": PrivacyBudget,
        "threat": ThreatModel,
        "objective": object,
        "mechanism": MechanismName,
        "grid": float,
        "cooldown_steps": int,
        "dtype": FloatType,
        "decomposition": object,
        "certificate": Certificate,
    }
    # Unknown and missing fields are refused: agents of two versions must not read one file
    # differently.
    fields = build_fields(hints, content, "content")
    fields["network"] = _decode_network(fields["network"])
    objective = fields["objective"]
    parts = dict(objective) if isinstance(objective, dict) else {}
    kind = parts.pop("kind", None)
    require_choice("kind of objective", kind, _OBJECTIVES)
    fields["objective"] = build(_OBJECTIVES[kind], parts, "objective")
    fields["decomposition"] = _decode_decomposition(fields["decomposition"])
    return Plan(**fields)


def _decode_network(data: object) -> Network:
    hints = {
        "source": str,
        "weights": str,
        "directed": bool,
        "agents": tuple[str, ...],
        "links": tuple[tuple[int, int], ...],
        "mixing_weights": tuple[tuple[int, int, float], ...],
        "gossip": Gossip,
        "mixing": Mixing,
    }
    fields = build_fields(hints, data, "network")
    require(not fields["directed"], "links", "undirected", "directed ones")
    graph = nx.Graph()
    for agent, name in enumerate(fields["agents"]):
        graph.add_node(agent, **({} if name == str(agent) else {"name": name}))
    n = len(graph)
    graph.add_edges_from(fields["links"])
    require(len(graph) == n, "links", "between agents", f"one of {len(graph) - n} others")
    rule = fields["weights"]
    matrix = _decode_weights(fields["mixing_weights"], n)
    if fields["mixing"] == "sum":
        rule = "metropolis"
        matrix = sparse_mixing_matrix(graph)
    return Network(graph, matrix, fields["source"], rule, fields["gossip"], fields["mixing"])


def _decode_weights(weights: Sequence[tuple[int, int, float]], num_agents: int) -> SparseMatrix:
    rows, columns, values = zip(*weights, strict=True) if weights else ((), (), ())
    # A second weight of a pair would be added to the first.
    is_once = len({*zip(rows, columns, strict=True)}) == len(weights)
    is_inside = set(rows) | set(columns) <= set(range(num_agents))
    require(is_once and is_inside, "mixing weights", "of two agents, each pair once", "others")
    shape = (num_agents, num_agents)
    return SparseMatrix((values, (rows, columns)), shape=shape, dtype=np.float64)


def _decode_decomposition(data: object) -> Decomposition:
    hints = {
        "private_variance": FloatArray,
        "seed_groups": SeedGroups,
        "factors": tuple[FloatArray, ...],
        "is_masked": bool,
    }
    fields = build_fields(hints, data, "decomposition")
    groups, factors = fields["seed_groups"], fields["factors"]
    require(len(set(groups)) == len(groups), "seed groups", "different", "one twice")
    if fields["is_masked"]:
        return Decomposition(fields["private_variance"], groups, factors, is_masked=True)
    require_length("factors", len(factors), len(groups), per="seed group")
    for group, factor in zip(groups, factors, strict=True):
        # Each stream takes time at every step. A covariance of m agents needs one for each of its
        # m(m+1)/2 numbers at most.
        most, name = len(group) * math.comb(len(group) + 1, 2), "the number of weights of a group"
        require_count(name, factor.size, least=0, most=most)
    # One row per member; a factor of another size raises a ValueError, which load_plan handles.
    shaped = (factor.reshape(len(group), -1) for group, factor in zip(groups, factors, strict=True))
    return Decomposition(fields["private_variance"], groups, tuple(shaped))


def _require_moderate(content: object) -> None:
    """Refuse lists longer than any plan of so many agents has, before they are hashed and built.

    Matrices of n × n numbers follow, and each seed group takes time in every check of a plan.
    """

    def find(*names: str) -> list[Any]:
        found = content
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        # Anything else is refused later, by its type.
        return found if isinstance(found, list) else []

    n = len(find("network", "agents"))
    if not n:
        return  # refused later, by what is missing
    is_sum = isinstance(content, dict) and content.get("network", {}).get("mixing") == "sum"
    require_count("the number of agents", n, most=_MOST_IN_SUMS if is_sum else _MOST_AGENTS)
    # A group for every pair, or in small networks any groups.
    most = max(_FEW_GROUPS, math.comb(n + 1, 2))
    for names in (("decomposition", "seed_groups"), ("threat", "seeds")):
        require_count("the number of seed groups", len(find(*names)), least=0, most=most)
    for row in find("certificate", "multipliers"):
        require_length("multipliers", len(row) if isinstance(row, list) else n, n, per="agent")
