"""Plans as files: canonical JSON with a fingerprint; loading checks everything and runs nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import networkx as nx
import numpy as np

from corn.covariance import (
    Decomposition,
    FiniteRun,
    GivenObjective,
    Horizon,
    Mechanism,
    Objective,
    ThreatModel,
)
from corn.errors import CornError, FileFormatError, InvalidArgumentError
from corn.plan.record import Certificate, FloatType, Plan
from corn.privacy import PrivacyBudget
from corn.topology import Network, name_of

SCHEMA = 2
Json: TypeAlias = dict[str, Any]

_OBJECTIVES: dict[str, type[Horizon] | type[FiniteRun]] = {
    "horizon": Horizon,
    "finite run": FiniteRun,
}


def fingerprint(plan: Plan) -> bytes:
    """32 bytes that stand for the whole plan: SHA-256 of its canonical content."""
    return hashlib.sha256(_canonical(_encode(plan))).digest()


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan; equal plans give equal files."""
    content = _encode(plan)
    document = {
        "corn_plan": SCHEMA,
        "fingerprint": hashlib.sha256(_canonical(content)).hexdigest(),
        "content": content,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_plan(path: Path) -> Plan:
    """Read a plan and check its form; :func:`~corn.plan.verify_plan` checks what it promises.

    Raises:
        FileFormatError: the file is missing, damaged, changed, of another version, or says
            something impossible; one line says which.
    """
    document = _read_document(path)
    if document.get("corn_plan") != SCHEMA:
        raise FileFormatError(
            f"{path}: not a plan of version {SCHEMA}, which this version of CorN reads, found "
            f"{document.get('corn_plan')!r}"
        )
    content: Json = document.get("content", {})
    try:
        digest = hashlib.sha256(_canonical(content)).hexdigest()
        if digest != document.get("fingerprint"):
            raise InvalidArgumentError("damaged or changed, its content has another fingerprint")
        plan = _decode(content)
        if _canonical(_encode(plan)) != _canonical(content):
            raise InvalidArgumentError("its content is not in canonical form")
    except KeyError as error:
        raise FileFormatError(f"{path}: not a valid plan: {error.args[0]!r} is missing") from error
    except (CornError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileFormatError(f"{path}: not a valid plan: {error}") from error
    return plan


def _read_document(path: Path) -> Json:
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such file") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not a plan, or cut short: {error}") from error
    if not isinstance(document, dict):
        raise FileFormatError(f"{path}: not a plan: a JSON object was expected")
    return document


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def _canonical(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def _encode(plan: Plan) -> Json:
    graph = plan.network.graph
    parts = plan.decomposition
    multipliers = plan.certificate.multipliers
    return {
        "corn_version": plan.corn_version,
        "network": {
            "source": plan.network.source,
            "weights": plan.network.weights,
            "directed": graph.is_directed(),
            "agents": [name_of(graph, agent) for agent in range(plan.num_agents)],
            "links": sorted([int(i), int(j)] for i, j in graph.edges),
            "mixing_matrix": plan.network.mixing_matrix.tolist(),
        },
        "budget": dataclasses.asdict(plan.budget),
        "threat": dataclasses.asdict(plan.threat),
        "objective": _encode_objective(plan.objective),
        "mechanism": plan.mechanism,
        "grid": plan.grid,
        "dtype": plan.dtype,
        "decomposition": {
            "private_variance": parts.private_variance.tolist(),
            "seed_groups": [list(group) for group in parts.seed_groups],
            "factors": [factor.tolist() for factor in parts.factors],
        },
        "certificate": {
            **dataclasses.asdict(plan.certificate),
            "multipliers": None if multipliers is None else multipliers.tolist(),
        },
    }


def _decode(content: Json) -> Plan:
    _check_keys(
        content,
        "corn_version network budget threat objective mechanism grid dtype decomposition "
        "certificate",
    )
    return Plan(
        network=_decode_network(content["network"]),
        budget=_build(PrivacyBudget, content["budget"]),
        threat=_decode_threat(content["threat"]),
        objective=_decode_objective(content["objective"]),
        mechanism=_take(content, "mechanism", Mechanism),
        decomposition=_decode_decomposition(content["decomposition"]),
        certificate=_decode_certificate(content["certificate"]),
        grid=_take(content, "grid", float),
        dtype=_take(content, "dtype", FloatType),
        corn_version=_take(content, "corn_version", str),
    )


def _decode_network(data: Json) -> Network:
    _check_keys(data, "source weights directed agents links mixing_matrix")
    graph = nx.DiGraph() if data["directed"] else nx.Graph()
    for agent, name in enumerate(data["agents"]):
        if not isinstance(name, str) or (name.isdecimal() and name != str(agent)):
            raise InvalidArgumentError(f"agent {agent} cannot be called {name!r:.60}")
        graph.add_node(agent, **({} if name == str(agent) else {"name": name}))
    for i, j in data["links"]:
        if i not in graph or j not in graph:
            raise InvalidArgumentError(f"a link joins {i} and {j}, which are not both agents")
        graph.add_edge(i, j)
    source, weights = _take(data, "source", str), _take(data, "weights", str)
    return Network(graph, np.array(data["mixing_matrix"]), source, weights)


def _decode_threat(data: Json) -> ThreatModel:
    seeds = data["seeds"]
    groups = seeds if isinstance(seeds, str) else tuple(tuple(group) for group in seeds)
    threat: ThreatModel = _build(ThreatModel, {**data, "seeds": groups})
    return threat


def _decode_decomposition(data: Json) -> Decomposition:
    _check_keys(data, "private_variance seed_groups factors")
    return Decomposition(
        np.array(data["private_variance"], dtype=np.float64),
        tuple(tuple(group) for group in data["seed_groups"]),
        tuple(
            np.array(factor, dtype=np.float64).reshape(len(group), -1)
            for group, factor in zip(data["seed_groups"], data["factors"], strict=True)
        ),
    )


def _decode_certificate(data: Json) -> Certificate:
    multipliers = data["multipliers"]
    proof = None if multipliers is None else np.array(multipliers, dtype=np.float64)
    certificate: Certificate = _build(Certificate, {**data, "multipliers": proof})
    return certificate


def _encode_objective(objective: Objective) -> Json:
    if isinstance(objective, GivenObjective):
        return {"kind": "given", "matrix": np.asarray(objective.given).tolist()}
    for kind, build in _OBJECTIVES.items():
        if isinstance(objective, build):
            return {"kind": kind, **dataclasses.asdict(objective)}
    raise InvalidArgumentError(
        f"a plan can hold a Horizon, FiniteRun or GivenObjective, found {type(objective).__name__}"
    )


def _decode_objective(data: Json) -> Objective:
    fields = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == "given":
        return GivenObjective(np.array(fields["matrix"], dtype=np.float64))
    if data["kind"] not in _OBJECTIVES:
        raise InvalidArgumentError(f"unknown kind of objective {data['kind']!r}")
    objective: Objective = _build(_OBJECTIVES[data["kind"]], fields)
    return objective


def _build(record: type[Any], data: Json) -> Any:
    """A record from its fields: all of them, no others, and of the types it declares."""
    hints = get_type_hints(record)
    names = [field.name for field in dataclasses.fields(record)]
    _check_keys(data, " ".join(names))
    return record(**{name: _take(data, name, hints[name]) for name in names})


def _take(data: Json, name: str, hint: Any) -> Any:
    if not _fits(data[name], hint):
        raise InvalidArgumentError(f"{name} cannot be {data[name]!r:.60}")
    return data[name]


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a plain type, a choice, or one of several; records check the rest."""
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint in (int, float):
        accepted = (int,) if hint is int else (int, float)
        return isinstance(value, accepted) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, NoneType) else True


def _check_keys(data: Json, expected: str) -> None:
    names = set(expected.split())
    if missing := names - set(data):
        raise KeyError(min(missing))
    if unknown := set(data) - names:
        raise InvalidArgumentError(f"unknown entry {min(unknown)!r}")
