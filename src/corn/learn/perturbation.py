"""The noise of all agents in all runs at one step, drawn when it is needed and never stored.

``JointNoise`` is line 6 of the paper's algorithm, v = R^{1/2} s, where all mechanisms of a seed use
the **same** standard normals s (common random numbers). ``KeyedNoise`` draws shares as agents do.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, final

import numpy as np
import scipy.sparse
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from corn.checks import FloatArray
from corn.covariance.coalitions import scale_streams
from corn.covariance.decomposition import Decomposition
from corn.noise import (
    Owner,
    Secret,
    SecureSource,
    SimulationSource,
    StreamAddress,
    draw_all_shares,
    draw_share,
    owners,
    simulated_keys,
)
from corn.noise.masks import MaskWords, draw_offset, is_possible, make_message, read_total
from corn.noise.stream import NONCE_BYTES
from corn.plan import Plan
from corn.topology.mixing import SparseMatrix

# Drawing a normal takes about as long as this many entries of a dense product.
_NORMAL_COST = 100
# Agents up to which one product of small dense roots is fastest.
_MOST_DENSE = 200


def make_root(noise: Decomposition) -> SparseMatrix | FloatArray:
    """Return F with F Fᵀ = R, shape (n, normals): sparse for noise of few streams."""
    if not _prefers_shares(noise):
        return symmetric_root(noise.covariance)
    # A scale of one leaves weights as they are: F = [diag(√θ), factors].
    shared, _ = scale_streams(noise, np.ones(noise.num_agents))
    private = scipy.sparse.diags_array(np.sqrt(noise.private_variance))
    return SparseMatrix(scipy.sparse.hstack([private, shared]))


def _prefers_shares(noise: Decomposition) -> bool:
    """Return whether a simulation draws noise faster from its shares than by a dense root."""
    n = noise.num_agents
    # Shares need one more normal per stream; a dense root costs n² products per coordinate.
    num_streams = sum(factor.shape[1] for factor in noise.factors)
    num_weights = sum(factor.size for factor in noise.factors)
    return _NORMAL_COST * num_streams < n**2 and num_weights < n**2 / 2


def symmetric_root(covariance: FloatArray) -> FloatArray:
    """Return the symmetric root R^{1/2} of a positive semidefinite R."""
    # An eigenvalue of zero may come out slightly negative.
    eigenvalues, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.maximum(eigenvalues, 0))) @ vectors.T)


@final
class JointNoise:
    """Noise v ~ N(0, R_m ⊗ I) for several mechanisms and seeds: fast, for simulations.

    Seeds are public: this noise protects nobody. With ``is_average`` it is the noise of the average
    of all agents, as of one agent.
    """

    def __init__(
        self,
        noises: Sequence[Decomposition],
        *,
        seeds: Sequence[int],
        num_parameters: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        is_average: bool = False,
    ) -> None:
        n = noises[0].num_agents
        self.is_average = is_average
        self._shape = (len(seeds), n, len(noises), num_parameters)
        self._device = device
        self._dense: Tensor | None = None
        num_normals = n
        if n <= _MOST_DENSE or not any(map(_prefers_shares, noises)):
            roots = np.stack([symmetric_root(each.covariance) for each in noises], axis=1)
            self._dense = torch.from_numpy(roots.reshape(-1, n)).to(device=device, dtype=dtype)
        else:
            self._roots = [
                (torch.from_numpy(F) if isinstance(F, np.ndarray) else to_sparse_tensor(F)).to(
                    device=device, dtype=dtype
                )
                for F in map(make_root, noises)
            ]
            num_normals = max(root.shape[1] for root in self._roots)
        # A stream of its own, apart from that of all agents' noise.
        self._owner = Owner(tuple(range(n)), None if is_average else 0)
        self._sources = [(SimulationSource(seed), simulation_nonce(seed)) for seed in seeds]
        real = np.float32 if dtype == torch.float32 else np.float64
        self._normals = np.empty((len(seeds), num_normals, num_parameters), real)

    def draw(self, step: int) -> Tensor:
        """Return the noise of a step, from 0, shape (seeds, agents, mechanisms, parameters)."""
        # One stream for all agents: addressing one for each would take longer than drawing.
        for normals, (source, nonce) in zip(self._normals, self._sources, strict=True):
            source.fill(normals.reshape(-1), StreamAddress(self._owner, nonce, step))
        s = torch.from_numpy(self._normals).to(self._device)
        if self._dense is not None:
            return torch.matmul(self._dense, s).view(self._shape)
        noise = s.new_empty(self._shape)
        for number, root in enumerate(self._roots):
            # Torch multiplies a sparse matrix with matrices only, so seeds are taken one by one.
            for out, normals in zip(noise, s, strict=True):
                out[:, number] = root @ normals[: root.shape[1]]
        return noise


@final
class KeyedNoise:
    """Agents' own shares of noise, from keys of each run's seed, or new secret ones."""

    def __init__(
        self,
        decompositions: Sequence[Decomposition],
        *,
        seeds: Sequence[int],
        num_parameters: int,
        device: torch.device | str = "cpu",
        is_secret: bool = False,
    ) -> None:
        self._stop = num_parameters
        self._device = device
        # Each mechanism and run has secret keys and a nonce of its own, so that none share noise.
        self._draws = [
            (
                [(own, make_source(own, seed, is_secret=is_secret)) for own in decompositions],
                secrets.token_bytes(NONCE_BYTES) if is_secret else simulation_nonce(seed),
            )
            for seed in seeds
        ]

    def draw(self, step: int) -> Tensor:
        """Return the noise of a step, from 0, shape (seeds, agents, mechanisms, parameters)."""
        noise = [
            [
                draw_all_shares(own, source=source, nonce=nonce, step=step, stop=self._stop)
                for own, source in draws
            ]
            for draws, nonce in self._draws
        ]
        return torch.from_numpy(np.ascontiguousarray(np.swapaxes(noise, 1, 2))).to(self._device)

    def draw_offset(self, step: int) -> Tensor | None:
        """Return the public offset of the grid, shape (seeds, 1, d), if all noise has masks."""
        if not all(shares.is_masked for draws, _ in self._draws for shares, _ in draws):
            return None
        offsets = [draw_offset(nonce, step, self._stop) for _, nonce in self._draws]
        return torch.from_numpy(np.stack(offsets)).to(self._device)[:, None]


@final
@dataclass(eq=False, repr=False)
class NoiseShare:
    """One agent's share of the noise, under a ``nonce`` for which none was drawn before."""

    plan: Plan
    agent: int
    source: SecureSource
    _: KW_ONLY
    nonce: bytes
    num_parameters: int
    offset_seed: bytes | None = None  # for a single release; by default the nonce
    # Noise is drawn in float64 whatever the model's type: the grid's proof assumes it.
    _values: Tensor | None = field(default=None, init=False)
    _prepared: int | None = field(default=None, init=False)

    def prepare(self, step: int) -> None:
        """Draw a step's noise while messages are under way; exact sums do so where it is added."""
        if self.plan.network.mixing != "sum":
            self._prepared = None  # a draw that is interrupted must not be taken for noise
            self._values = self.draw(step, out=self._values)
            self._prepared = step

    def take(self, step: int) -> DrawnNoise:
        """Return the noise of a step."""
        if self._prepared != step:
            self.prepare(step)
        # A share is handed out once: noise used twice cancels in the difference of two messages.
        self._prepared = None
        return DrawnNoise(self, step, self._values)

    def draw(self, step: int, *, out: Tensor | None = None) -> Tensor:
        """Return this agent's noise v_i of a step, float64 of shape (d,), in ``out`` if given."""
        values = torch.empty(self.num_parameters, dtype=torch.float64) if out is None else out
        draw_share(
            self.plan.decomposition,
            self.agent,
            source=self.source,
            nonce=self.nonce,
            step=step,
            stop=self.num_parameters,
            out=values.numpy(),
        )
        return values


@dataclass(frozen=True, eq=False)
class DrawnNoise:
    """One agent's noise of one step; ``prepared`` under gossip, until the next draw."""

    share: NoiseShare = field(repr=False)
    step: int
    prepared: Tensor | None = field(default=None, repr=False)

    @property
    def values(self) -> Tensor:
        """v_i, float64 of shape (d,)."""
        return self.share.draw(self.step) if self.prepared is None else self.prepared

    def make_message(self, gradient: Tensor, factor: Tensor) -> MaskWords:
        """Return the agent's message for an exact sum: its release under its masks, shape (d,)."""
        own = self.share
        return make_message(
            gradient.numpy(),
            float(factor),
            noise=own.plan.decomposition,
            agent=own.agent,
            source=own.source,
            nonce=own.nonce,
            step=self.step,
            offset=self._offset,
            grid=own.plan.grid,
            bits=own.plan.mask_bits,
        )

    def read_total(self, total: MaskWords, dtype: DTypeLike) -> NDArray[Any] | None:
        """Return the average release from the sum of all messages; None if masks did not cancel."""
        plan = self.share.plan
        if not is_possible(total, plan.largest_sum):
            return None
        return read_total(
            total,
            num_agents=plan.num_agents,
            grid=plan.grid,
            offset=self._offset if plan.decomposition.is_masked else None,
            dtype=dtype,
        )

    @property
    def _offset(self) -> tuple[bytes, int]:
        """The nonce and the step of the public offset."""
        seed = self.share.offset_seed
        # A seed is of one release, so that there are no other steps to keep apart.
        return (self.share.nonce, self.step) if seed is None else (seed, 0)


def make_source(shares: Decomposition, seed: int, *, is_secret: bool) -> SecureSource:
    """Return keys of all agents that follow from a seed, or new secret ones, in memory alone."""
    if not is_secret:
        return SecureSource(simulated_keys(shares, seed=seed))
    everyone = owners(shares, range(shares.num_agents))
    return SecureSource({owner: Secret.random() for owner in everyone})


def simulation_nonce(seed: int) -> bytes:
    """Return a run's nonce in a simulation, derived from its seed so that runs can be repeated."""
    return hashlib.blake2b(f"corn simulation {seed}".encode(), digest_size=32).digest()


def to_sparse_tensor(matrix: SparseMatrix) -> Tensor:
    """Return a sparse matrix as torch's, in float64."""
    with warnings.catch_warnings():
        # Torch warns that sparse rows are new. Products with them are all that is needed here.
        warnings.simplefilter("ignore", UserWarning)
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64)),
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(np.array(matrix.data, dtype=np.float64)),
            size=matrix.shape,
            check_invariants=False,
        )
