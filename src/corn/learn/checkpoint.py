"""Save a sweep between steps and go on later, with the same result to the last bit.

Batches and noise are functions of seed and step, so models and measurements are all there is to
save. That draws the noise of no step twice for different data: a simulation that resumes repeats
nothing. (A deployment must not resume this way: see :mod:`corn.noise.ledger`.)
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corn.errors import FileFormatError
from corn.files import writing_whole
from corn.learn.batches import AgentData
from corn.learn.method import Trial
from corn.learn.metrics import Row, Samples
from corn.learn.settings import SweepSettings
from corn.learn.tasks import Task
from corn.learn.tasks.protocol import HasFingerprint
from corn.topology import Network

_VERSION = 2


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a sweep after ``step`` steps.

    Attributes:
        fingerprint: of everything the result depends on; a checkpoint fits no other sweep.
        parameters: shape (seeds, agents, trials, parameters).
        alive: which runs go on, shape (seeds, trials).
        rows: the measurements so far.
        stopped: why the others do not, by the indices of seed and trial.
    """

    fingerprint: str
    step: int
    parameters: Tensor
    alive: Tensor
    rows: list[Row]
    stopped: dict[tuple[int, int], str]


def save_checkpoint(checkpoint: Checkpoint, path: Path | str) -> None:
    """Write a checkpoint; a crash while writing leaves the one before it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # It holds losses on training data, which no noise covers.
    private = writing_whole(target, durable=True, is_private=True)
    with private as partial, partial.open("wb") as stream:
        torch.save({"version": _VERSION, **vars(checkpoint)}, stream)


def load_checkpoint(path: Path | str, *, fingerprint: str) -> Checkpoint:
    """Read the checkpoint of the sweep with this fingerprint; any other is refused."""
    try:
        # Plain data only: a checkpoint from elsewhere cannot run code.
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        version = saved.pop("version")
        checkpoint = Checkpoint(**saved)
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: no such checkpoint") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise FileFormatError(f"{path}: not a checkpoint of a sweep, or damaged") from error
    if version != _VERSION or checkpoint.fingerprint != fingerprint:
        raise FileFormatError(
            f"{path}: made by a sweep with other data, network, methods or settings; give it "
            "those, or another file"
        )
    return checkpoint


def fingerprint_of(
    task: Task,
    data: AgentData,
    network: Network,
    trials: Sequence[Trial],
    *,
    settings: SweepSettings,
    parts: Mapping[str, Samples],
) -> str:
    """A hash of all that the result depends on, in hexadecimal."""
    digest = hashlib.sha256()
    plain = {
        "task": task.describe(),
        "settings": asdict(settings),
        "offsets": data.offsets,
        "trials": [(v.describe(), repr(v.schedule), repr(v.method)) for v in trials],
    }
    digest.update(json.dumps(plain).encode())
    arrays = [network.mixing_matrix, data.inputs.cpu().numpy(), data.targets.cpu().numpy()]
    arrays += [v.method.noise.covariance for v in trials if v.method.noise is not None]
    arrays += [task.initialize(seed).numpy() for seed in settings.seeds]
    # Measurements before and after an interruption must be of the same samples.
    for name in sorted(parts):
        digest.update(f"{name} {len(parts[name][1])}".encode())
        arrays += [values.cpu().numpy() for values in parts[name]]
    if isinstance(task, HasFingerprint):
        digest.update(task.fingerprint())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
