"""The clipped gradient that an agent releases at each step: its unit and its sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from corn.checks import require, require_choice, require_count, require_in_range
from corn.errors import InvalidArgumentError

Unit: TypeAlias = Literal["agent", "sample"]
Adjacency: TypeAlias = Literal["replace", "add-remove"]


MOST_SAMPLES = 16.0
"""The most samples an agent may have, as a multiple of batch_size/sampling_rate."""

# Beyond these, squares of gradients leave single precision: norms would come out as 0 or ∞.
_SMALLEST_CLIP, _LARGEST_CLIP = 1e-15, 1e15
_LARGEST_BATCH = 10**12


@dataclass(frozen=True)
class ClippedQuery:
    """A clipped gradient, as one agent releases it (with noise) at every step.

    ``unit`` states whose data is protected, and so what must be clipped:

    - ``"agent"``: one agent's whole data set. Its mini-batch gradient is clipped **once** to norm
      ``clip``. Clipping each sample does not give this unit, however the samples are averaged.
    - ``"sample"``: one sample of one agent. **Each** sample's gradient is clipped, and their sum
      divided by ``batch_size``. With ``sampling_rate`` p every sample is in a batch with
      probability p, independently (Poisson sampling); ``batch_size`` is then the fixed divisor, the
      *expected* size, never the size that was drawn.

    ``adjacency`` defines neighbouring data sets: ``"replace"`` (the unit's data becomes any other)
    or ``"add-remove"`` (its gradient is present, or is zero). Under Poisson sampling the latter is
    adding or removing one sample. In a batch of fixed size another sample would take its place, and
    without an agent the graph would be another one: there the relation is known as zero-out, and is
    called so.

    >>> ClippedQuery(0.1).sensitivity
    0.2
    """

    clip: float
    unit: Unit = "agent"
    adjacency: Adjacency = "replace"
    batch_size: int | None = None
    sampling_rate: float | None = None

    def __post_init__(self) -> None:
        require_in_range("clip", self.clip, _SMALLEST_CLIP, _LARGEST_CLIP, advice="try 0.1")
        require_choice("unit", self.unit, get_args(Unit))
        require_choice("adjacency", self.adjacency, get_args(Adjacency))
        if self.unit == "agent":
            self._check_agent()
        else:
            self._check_sample()

    @property
    def contribution(self) -> float:
        """The largest norm of the unit's part of the release: C, or C/B for a sample."""
        return self.clip if self.batch_size is None else self.clip / self.batch_size

    @property
    def sensitivity(self) -> float:
        """Δ: the largest distance between the releases of neighbouring data sets."""
        return 2 * self.contribution if self.adjacency == "replace" else self.contribution

    @property
    def largest_norm(self) -> float:
        """The largest norm of one agent's gradient before noise.

        Under Poisson sampling a batch may be all of an agent's samples. There should be
        batch_size/sampling_rate of them, and may be up to ``MOST_SAMPLES`` times as many.
        """
        if self.sampling_rate is None:
            return self.clip
        # Up to MOST_SAMPLES·B/p samples of norm C each, divided by B.
        return MOST_SAMPLES * self.clip / self.sampling_rate

    @property
    def is_subsampled(self) -> bool:
        """Whether Poisson sampling amplifies privacy; a rate of 1 uses all data and does not."""
        return self.sampling_rate is not None and self.sampling_rate < 1

    @property
    def protects(self) -> str:
        """The data that the noise protects, in words."""
        return "one agent's whole data set" if self.unit == "agent" else "one sample of one agent"

    @property
    def recipe(self) -> str:
        """The clipping, the averaging and the adjacency, in words."""
        # Printed beside every ε: under zero-out, Δ and with it μ are half of those of replace-one.
        relation = "replace-one"
        if self.adjacency == "add-remove":
            relation = "zero-out" if self.sampling_rate is None else "add-or-remove-one"
        return f"{self._clipping}; {relation} adjacency"

    @property
    def _clipping(self) -> str:
        if self.unit == "agent":
            return f"its mini-batch gradient is clipped once to {self.clip:g}"
        clipping = f"each sample's gradient is clipped to {self.clip:g}"
        if self.sampling_rate is None:
            return f"{clipping} and averaged over batches of {self.batch_size}"
        return (
            f"{clipping}, taken with probability {self.sampling_rate:g}, and the sum divided by "
            f"{self.batch_size}"
        )

    def _check_agent(self) -> None:
        # The mean over the batch is clipped as a whole. Its norm is at most C for any batch size,
        # and all of it may change with the agent's data: Δ must not be divided by the batch size.
        if self.batch_size is not None:
            raise InvalidArgumentError(
                f"batch_size must be None for unit='agent', found {self.batch_size}: the agent's "
                "gradient is clipped once, whatever the batch, so the batch cannot lower its "
                "sensitivity; if each sample is clipped, use unit='sample'"
            )
        if self.sampling_rate is not None:
            raise InvalidArgumentError(
                f"sampling_rate must be None for unit='agent', found {self.sampling_rate}: every "
                "agent takes part in every step, so nothing is amplified; to protect samples, use "
                "unit='sample'"
            )

    def _check_sample(self) -> None:
        if self.batch_size is None:
            raise InvalidArgumentError(
                "batch_size must be given for unit='sample', found None: a sample's sensitivity is "
                "the clip over the batch size"
            )
        require_count("batch_size", self.batch_size, most=_LARGEST_BATCH)
        require(
            self.sampling_rate is None or 0 < self.sampling_rate <= 1,
            "sampling_rate",
            "in (0, 1]",
            self.sampling_rate,
            advice="it is the expected batch size over the agent's number of samples",
        )
