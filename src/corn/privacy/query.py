"""The clipped gradient that an agent releases at each step: unit, sampling and sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from corn.arrays import FloatArray
from corn.checks import require, require_choice, require_count, require_in_range
from corn.errors import InvalidArgumentError
from corn.privacy.rounding import write_exactly

Unit: TypeAlias = Literal["agent", "sample"]
Adjacency: TypeAlias = Literal["replace", "add-remove"]
Sampling: TypeAlias = Literal["poisson", "passes", "every-step"]


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
      divided by ``batch_size``, the fixed divisor: never by the number of samples in the batch.

    ``sampling`` states which steps may use one sample:

    - ``"poisson"`` (the default for samples): each sample is in a batch with probability
      ``sampling_rate``, independently, by secret coins. ``batch_size`` is the *expected* size.
    - ``"passes"``: passes of ``steps_per_pass`` batches with ``batch_size`` slots each, filled in a
      new secret order. A sample is in at most one batch of a pass.
    - ``"every-step"``: a sample may be in every batch. The only one for unit ``"agent"``.

    ``adjacency`` defines neighbouring data sets: ``"replace"`` (the unit's data becomes any other)
    or ``"add-remove"`` (its gradient is present, or is zero). Under Poisson sampling the latter is
    adding or removing one sample. In a batch of fixed size another sample would take its place, and
    without an agent the graph would be another one. There the relation is known as zero-out, and
    outputs call it that.

    >>> ClippedQuery(0.1).sensitivity
    0.2
    """

    clip: float
    unit: Unit = "agent"
    adjacency: Adjacency = "replace"
    batch_size: int | None = None
    sampling: Sampling | None = None
    sampling_rate: float | None = None
    steps_per_pass: int | None = None

    def __post_init__(self) -> None:
        require_in_range("clip", self.clip, _SMALLEST_CLIP, _LARGEST_CLIP, advice="try 0.1")
        object.__setattr__(self, "sampling", choose_sampling(self.unit, self.sampling))
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
    def least_samples(self) -> int:
        """The fewest samples with which an agent's batches have their planned size, on average.

        An agent with fewer has smaller batches: a sample is never used more often than was counted.
        """
        if self.batch_size is None:
            return 1
        if self.steps_per_pass is not None:
            return self.batch_size * self.steps_per_pass if self.steps_per_pass > 1 else 1
        if not self.is_subsampled or self.sampling_rate is None:
            return 1
        least = math.ceil(self.batch_size / self.sampling_rate)
        # Division rounds: the rate that was computed from m samples must accept m samples.
        fewer = max(least - 1, 1)
        return fewer if self.batch_size / fewer <= self.sampling_rate else least

    def participations(self, num_steps: int) -> int:
        """Return the most steps of a run that use the unit's data: all, or one for each pass begun.

        Under Poisson sampling all steps may; the coins make most of them unlikely.

        >>> query = ClippedQuery(
        ...     1, unit="sample", batch_size=128, sampling="passes", steps_per_pass=21
        ... )
        >>> query.participations(1000)
        48
        """
        return -(-num_steps // (self.steps_per_pass or 1))

    @property
    def protects(self) -> str:
        """The data that the noise protects, in words."""
        return "one agent's whole data set" if self.unit == "agent" else "one sample of one agent"

    @property
    def recipe(self) -> str:
        """The clipping, the sampling and the adjacency, in words."""
        return describe_queries([self])

    def _check_agent(self) -> None:
        # The mean over the batch is clipped as a whole. Its norm is at most C for any batch size,
        # and all of it may change with the agent's data: Δ must not be divided by the batch size.
        if self.batch_size is not None:
            raise InvalidArgumentError(
                f"batch_size must be None for unit='agent', found {self.batch_size}: the agent's "
                "gradient is clipped once, whatever the batch, so the batch cannot lower its "
                "sensitivity; if each sample is clipped, use unit='sample'"
            )
        for name in ("sampling_rate", "steps_per_pass"):
            found = getattr(self, name)
            if found is not None:
                raise InvalidArgumentError(
                    f"{name} must be None for unit='agent', found {found}: every agent takes part "
                    "in every step, so nothing is amplified; to protect samples, use unit='sample'"
                )

    def _check_sample(self) -> None:
        if self.batch_size is None:
            raise InvalidArgumentError(
                "batch_size must be given for unit='sample', found None: a sample's sensitivity is "
                "the clip over the batch size"
            )
        require_count("batch_size", self.batch_size, most=_LARGEST_BATCH)
        needed = {"poisson": "sampling_rate", "passes": "steps_per_pass"}
        for kind, name in needed.items():
            found = getattr(self, name)
            # A number that the sampling does not use would be ignored in silence.
            if (found is not None) != (kind == self.sampling):
                state = "be given" if found is None else "be None"
                raise InvalidArgumentError(
                    f"{name} must {state} for sampling={self.sampling!r}, found {found}: poisson "
                    "needs sampling_rate, passes needs steps_per_pass, every-step needs neither"
                )
        require(
            self.sampling_rate is None or 0 < self.sampling_rate <= 1,
            "sampling_rate",
            "in (0, 1]",
            self.sampling_rate,
            advice="it is the expected batch size over the agent's number of samples",
        )
        if self.steps_per_pass is not None:
            require_count("steps_per_pass", self.steps_per_pass)


def choose_sampling(unit: Unit, sampling: Sampling | None) -> Sampling:
    """Return the sampling, or the default of the unit: Poisson for samples.

    >>> choose_sampling("sample", None)
    'poisson'
    """
    require_choice("unit", unit, get_args(Unit))
    if sampling is None:
        return "every-step" if unit == "agent" else "poisson"
    require_choice("sampling", sampling, get_args(Sampling))
    require(
        unit == "sample" or sampling == "every-step",
        "sampling",
        "'every-step' for unit='agent'",
        repr(sampling),
        advice="every agent takes part in every step; to protect samples, use unit='sample'",
    )
    return sampling


def describe_queries(queries: Sequence[ClippedQuery]) -> str:
    """Return clipping, sampling and adjacency in words; the queries differ in sampling at most."""
    query = queries[0]
    # Printed beside every ε: under zero-out, Δ and with it μ are half of those of replace-one.
    relation = "replace-one"
    if query.adjacency == "add-remove":
        relation = "add-or-remove-one" if query.sampling == "poisson" else "zero-out"
    return f"{_describe_clipping(queries)}; {relation} adjacency"


def _describe_clipping(queries: Sequence[ClippedQuery]) -> str:
    query = queries[0]
    if query.unit == "agent":
        return f"its mini-batch gradient is clipped once to {write_exactly(query.clip)}"
    clipping = f"each sample's gradient is clipped to {write_exactly(query.clip)}"
    if query.sampling == "poisson":
        rates = describe_range([q.sampling_rate or 1.0 for q in queries], digits=6)
        return (
            f"{clipping}, taken with probability {rates} (Poisson sampling), and the sum divided "
            f"by {query.batch_size}"
        )
    batches = f"{clipping} and averaged over batches of {query.batch_size}"
    if query.sampling == "passes":
        lengths = describe_range([q.steps_per_pass or 1 for q in queries])
        return f"{batches}, each once in a pass of {lengths} batches in a new secret order"
    return f"{batches}, of which each may have the sample"


def describe_range(values: Sequence[float] | FloatArray, *, digits: int = 12) -> str:
    """Return the one value, or the least and the largest, so that any number of agents fits a line.

    >>> describe_range([1, 8, 1]), describe_range([0.05, 0.05 + 1e-15])
    ('1 to 8', '0.05')
    """
    ends = (f"{value:.{digits}g}" for value in (min(values), max(values)))
    # By their text, as values that differ in later digits would be shown as "1 to 1".
    return " to ".join(dict.fromkeys(ends))
