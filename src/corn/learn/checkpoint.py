"""Checkpoints of a sweep: a resumed sweep has the same result to the last bit.

Batches and noise are functions of seed and step, so a checkpoint needs models, momenta, states of
optimizers and measurements only. Resuming is for simulations. A deployment must not resume this
way, because it would release steps twice: see :mod:`corn.noise.ledger`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corn.covariance.lattice import LatticeNoise
from corn.errors import FileFormatError
from corn.files import writing_whole
from corn.learn.batches import AgentData
from corn.learn.method import Method, Trial
from corn.learn.metrics import Row, Samples
from corn.learn.optimizers import describe_optimizer
from corn.learn.result import BreakdownCause
from corn.learn.settings import SweepSettings
from corn.learn.tasks import HasFingerprint, Task
from corn.topology import Network

# Increased when the fields change: an older file is then refused, not misread.
_VERSION = 5


@dataclass(frozen=True, eq=False)
class SweepCheckpoint:
    """The state of a sweep after ``step`` steps.

    Attributes:
        fingerprint: a hash of everything the result depends on; it fits no other sweep.
        parameters: shape (seeds, agents, trials, parameters).
        memory: the average of releases, of the same shape; None without momentum.
        optimizers: the state of each run's optimizer; None without.
        alive: the runs that continue, shape (seeds, trials).
        rows: the measurements so far.
        stopped: step and cause of each breakdown, by the indices of seed and trial.
    """

    fingerprint: str
    step: int
    parameters: Tensor
    memory: Tensor | None
    optimizers: list[dict[str, Any]] | None
    alive: Tensor
    rows: list[Row]
    stopped: dict[tuple[int, int], tuple[int, BreakdownCause]]


def save_sweep(checkpoint: SweepCheckpoint, path: Path | str) -> None:
    """Write a checkpoint; a crash while writing leaves the previous one intact."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The measurements include losses on training data, which no noise covers.
    private = writing_whole(target, durable=True, is_private=True)
    with private as partial, partial.open("wb") as stream:
        torch.save({"version": _VERSION, **vars(checkpoint)}, stream)


def load_sweep(path: Path | str, *, fingerprint: str) -> SweepCheckpoint:
    """Read the checkpoint of the sweep with this fingerprint; raise for any other file."""
    try:
        # Plain data only: a checkpoint from an untrusted source cannot run code.
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        # A missing or unknown field raises ``KeyError`` or ``TypeError``, and an object without
        # fields ``AttributeError``: such a file counts as damaged.
        version = saved.pop("version")
        checkpoint = SweepCheckpoint(**saved)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such checkpoint") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise FileFormatError(f"{path}: not a checkpoint of a sweep, or damaged") from error
    if version != _VERSION or checkpoint.fingerprint != fingerprint:
        raise FileFormatError(
            f"{path}: must be a checkpoint of this sweep, found one with other data, network, "
            "methods or settings: repeat those, or choose another file"
        )
    return checkpoint


def fingerprint_sweep(
    task: Task,
    data: AgentData,
    network: Network,
    trials: Sequence[Trial],
    *,
    settings: SweepSettings,
    parts: Mapping[str, Samples],
) -> str:
    """Return a hash, in hexadecimal, of everything that the result of a sweep depends on."""
    digest = hashlib.sha256()
    plain = {
        "task": task.describe(),
        "settings": {**vars(settings), "optimizer": describe_optimizer(settings.optimizer)},
        "mixing": network.mixing,
        "offsets": data.offsets,
        "trials": [(t.describe(), repr(t.schedule), repr(t.method)) for t in trials],
    }
    digest.update(json.dumps(plain).encode())
    # Initial parameters are part of it: a task may draw them in its own way.
    arrays = [*_links_of(network), data.inputs.cpu().numpy(), data.targets.cpu().numpy()]
    arrays += [part for t in trials for part in _noise_of(t.method)]
    arrays += [task.initialize(seed).numpy() for seed in settings.seeds]
    # Measurements before and after an interruption must be of the same samples.
    for name in sorted(parts):
        digest.update(f"{name} {len(parts[name][1])}".encode())
        arrays += [values.cpu().numpy() for values in parts[name]]
    # A module's layers and frozen values show neither in ``describe`` nor in the start.
    if isinstance(task, HasFingerprint):
        digest.update(task.fingerprint())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _links_of(network: Network) -> list[NDArray[Any]]:
    # By links: W of a large network would be n² numbers.
    W = network.sparse_matrix
    return [W.indptr, W.indices, W.data, np.array(network.schedule)]


def _noise_of(method: Method) -> list[NDArray[Any]]:
    """Return all numbers that a method's noise depends on."""
    if method.noise is None:
        return []
    if isinstance(method.noise, LatticeNoise):
        return [method.noise.eigenvalues]
    # Members too: the same factors on other agents are other noise.
    members = [np.array(group) for group in method.noise.seed_groups]
    return [method.noise.private_variance, *members, *method.noise.factors]
