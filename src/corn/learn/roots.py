"""Roots of covariances: what turns standard normals into the joint noise of all agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from corn.arrays import FloatArray
from corn.covariance.coalition_bounds import scale_streams
from corn.covariance.decomposition import Decomposition
from corn.covariance.lattice import LatticeNoise
from corn.learn.mixer import to_sparse_tensor
from corn.topology.mixing import SparseMatrix

# Drawing a normal takes about as long as this many entries of a dense product.
_NORMAL_COST = 100


class NoiseRoot(Protocol):
    """A linear map F with F Fᵀ = R."""

    @property
    def num_normals(self) -> int:
        """The number of columns of F: the normals of one coordinate."""

    def apply(self, normals: Tensor) -> Tensor:
        """Return the noise, shape (seeds, agents, d), from (seeds, normals, d)."""


@final
@dataclass(frozen=True, eq=False)
class DiagonalRoot:
    """Private noise: ``deviations`` has the standard deviation of each agent."""

    deviations: Tensor

    @property
    def num_normals(self) -> int:
        """See ``NoiseRoot``."""
        return len(self.deviations)

    def apply(self, normals: Tensor) -> Tensor:
        """See ``NoiseRoot``."""
        return normals * self.deviations[:, None]


@final
@dataclass(frozen=True, eq=False)
class MatrixRoot:
    """A matrix F, dense or sparse, shape (agents, normals)."""

    matrix: Tensor

    @property
    def num_normals(self) -> int:
        """See ``NoiseRoot``."""
        return int(self.matrix.shape[1])

    def apply(self, normals: Tensor) -> Tensor:
        """See ``NoiseRoot``."""
        return torch.stack([self.matrix @ own for own in normals])


@final
@dataclass(frozen=True, eq=False)
class FourierRoot:
    """The symmetric root of a covariance that is diagonal in a Fourier basis.

    ``roots`` are those of the eigenvalues, in the shape of the ring or torus.
    """

    roots: Tensor

    @property
    def num_normals(self) -> int:
        """See ``NoiseRoot``."""
        return self.roots.numel()

    def apply(self, normals: Tensor) -> Tensor:
        """See ``NoiseRoot``."""
        sides = self.roots.shape
        dims = tuple(range(1, 1 + len(sides)))
        # Agents are numbered row by row, so that reshaping gives each its place on the lattice. The
        # transform runs over agents, for every coordinate by itself.
        modes = torch.fft.rfftn(normals.reshape(-1, *sides, normals.shape[-1]), dim=dims)
        # The transform of real numbers is kept for half of the last side alone.
        modes *= self.roots[..., : modes.shape[dims[-1]], None]
        noise: Tensor = torch.fft.irfftn(modes, s=sides, dim=dims)
        return noise.reshape(normals.shape)


def make_root(
    noise: Decomposition | LatticeNoise, *, dtype: torch.dtype, device: torch.device | str
) -> NoiseRoot:
    """Return the root of a method's noise with which a step takes least time."""
    if isinstance(noise, LatticeNoise):
        # A symmetric circulant R is diagonal in the Fourier basis, and so is its root.
        roots = torch.from_numpy(np.sqrt(noise.eigenvalues))
        return FourierRoot(roots.to(device=device, dtype=dtype))
    if not noise.seed_groups:
        deviations = torch.from_numpy(np.sqrt(noise.private_variance))
        return DiagonalRoot(deviations.to(device=device, dtype=dtype))
    if prefers_shares(noise):
        matrix = to_sparse_tensor(join_shares(noise))
    else:
        matrix = torch.from_numpy(symmetric_root(noise.covariance))
    return MatrixRoot(matrix.to(device=device, dtype=dtype))


def prefers_shares(noise: Decomposition | LatticeNoise) -> bool:
    """Return whether a simulation draws noise faster from its shares than by a dense root."""
    if isinstance(noise, LatticeNoise):
        return True
    n = noise.num_agents
    # Shares need one more normal per stream; a dense root costs n² products per coordinate.
    num_streams = sum(factor.shape[1] for factor in noise.factors)
    num_weights = sum(factor.size for factor in noise.factors)
    return _NORMAL_COST * num_streams < n**2 and num_weights < n**2 / 2


def join_shares(noise: Decomposition) -> SparseMatrix:
    """Return all agents' weights of all streams, private ones first, shape (n, streams)."""
    # A scale of one leaves weights as they are: F = [diag(√θ), factors], F Fᵀ = R.
    shared, _ = scale_streams(noise, np.ones(noise.num_agents))
    private = scipy.sparse.diags_array(np.sqrt(noise.private_variance))
    return SparseMatrix(scipy.sparse.hstack([private, shared]))


def symmetric_root(covariance: FloatArray) -> FloatArray:
    """Return the symmetric root R^{1/2} of a positive semidefinite R.

    >>> symmetric_root(np.array([[4.0, 0.0], [0.0, 0.0]])).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """
    # An eigenvalue of zero may come out slightly negative.
    eigenvalues, vectors = np.linalg.eigh(covariance)
    return np.asarray((vectors * np.sqrt(np.maximum(eigenvalues, 0))) @ vectors.T)
