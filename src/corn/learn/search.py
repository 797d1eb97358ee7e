"""Search for step sizes: begin where the noise suggests, go on while an end is best, then refine.

Step sizes are members of the series … 0.1, 0.2, 0.5, 1, 2, 5 …, known by their place in it: 1 has
place 0. Every round trains the whole number of steps, because short runs favour step sizes that are
too large. All rounds have the same seeds, and so the same batches and noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from corn.learn.method import Method, Trial
from corn.learn.optimizers import read_learning_rate
from corn.learn.problem import TrainingProblem
from corn.learn.result import Result, join_results
from corn.learn.schedule import Schedule, ScheduleName, make_schedule
from corn.learn.settings import SweepSettings
from corn.learn.sweep import run_sweep
from corn.plan.advice import bound_gradient_variance, expect_step_size
from corn.topology import Network

# Nearly equal factors of 2, 2.5 and 2, with names that are short in tables.
_MANTISSAS = (1, 2, 5)
# Two places are a factor of 4 to 5. A search ends 5 times as far from its start at most, which is a
# factor of about 2000.
_STRIDE, _FURTHEST = 2, 10
# An end whose loss is less than this better than the last one is not worth another run.
_LEAST_GAIN = 0.01
# The paper's largest step size. Without clipping there is nothing to tell the scale of gradients.
_UNCLIPPED_START = 0.1


def search_step_sizes(
    problem: TrainingProblem,
    network: Network,
    methods: Sequence[Method],
    *,
    settings: SweepSettings,
    schedule: ScheduleName = "constant",
    column: str = "validation_loss",
    checkpoint: Path | None = None,
    **options: Any,
) -> Result:
    """Run each method with three step sizes, then with further ones as ``propose_places`` decides.

    Every round after the first has a checkpoint of its own, with the number of the round in its
    name. An interrupted round is left out, unless it is the first. Methods that do not clip are
    searched only as long as one that does is. ``options`` are those of
    :func:`corn.learn.sweep.run_sweep`.
    """
    problem.require_samples(column)
    if settings.optimizer is None:
        starts = {m: expect_place(m, problem, settings.num_steps, schedule) for m in methods}
    else:
        # An optimizer may scale releases as it likes, so its own learning rate is the best guess.
        starts = dict.fromkeys(methods, nearest_place(read_learning_rate(settings.optimizer)))
    wanted: dict[Method, tuple[int, ...]] = {
        m: (place - _STRIDE, place, place + _STRIDE) for m, place in starts.items()
    }
    tried: dict[Method, tuple[int, ...]] = dict.fromkeys(methods, ())
    found: Result | None = None
    number = 0
    while found is None or wanted:
        number += 1
        trials = [Trial(m, _schedule_at(k, schedule)) for m, own in wanted.items() for k in own]
        file = _name_checkpoint(checkpoint, number)
        new = run_sweep(problem, network, trials, settings=settings, checkpoint=file, **options)
        # Half a round would compare runs of different lengths.
        if new.status == "interrupted":
            return new if found is None else replace(found, status="interrupted")
        found = new if found is None else join_results(found, new)
        tried = {m: tried[m] + wanted.get(m, ()) for m in methods}
        average = found.average(column)
        proposed = {
            m: propose_places(
                {k: average[m.name, _schedule_at(k, schedule).describe()] for k in tried[m]},
                start=starts[m],
            )
            for m in methods
        }
        wanted = {m: places for m, places in proposed.items() if places}
        # Methods that clip samples decide how batches are drawn. A round without any would have
        # other batches than the rounds before.
        if not any(m.queries for m in wanted) and any(m.queries for m in methods):
            wanted = {}
    return found


def propose_places(losses: Mapping[int, float], *, start: int) -> tuple[int, ...]:
    """Return the places to try next, given the losses so far; none if the search is over.

    Beyond an end that is the best so far there may be a better one, unless the end has gained less
    than one percent. An inner place is refined by its two neighbours.

    >>> propose_places({-2: 0.9, 0: 0.7, 2: 0.6}, start=0)
    (4,)
    >>> propose_places({-2: 0.9, 0: 0.7, 2: 0.6, 4: 0.8}, start=0)
    (1, 3)
    """
    tried = sorted(losses)
    best = min(tried, key=losses.__getitem__)
    if best == tried[0]:
        outward, inner = best - _STRIDE, tried[1]
    else:
        outward, inner = best + _STRIDE, tried[tried.index(best) - 1]
    gain = losses[inner] - losses[best]
    # If all runs broke down, the least step size counts as the best, and a smaller one is tried.
    is_worthwhile = math.isinf(losses[best]) or gain > _LEAST_GAIN * abs(losses[best])
    is_end = best in (tried[0], tried[-1])
    if is_end and is_worthwhile and abs(outward - start) <= _FURTHEST:
        return (outward,)
    between = (best - 1, best + 1)
    # Beyond the ends nothing is refined: an end that gained too little is the end of the search.
    return tuple(k for k in between if k not in losses and tried[0] < k < tried[-1])


def expect_place(
    method: Method, problem: TrainingProblem, num_steps: int, schedule: ScheduleName
) -> int:
    """Return the place of the step size that a method's clip and noise suggest."""
    if math.isinf(method.clip):
        return nearest_place(_UNCLIPPED_START)
    noise, query = method.noise, method.query
    # The average over agents has the noise 1ᵀv/n, whose variance is 1ᵀR1/n².
    n = problem.data.num_agents
    variance = 0.0 if noise is None else noise.total_variance / n**2
    expected = expect_step_size(
        num_steps=num_steps,
        clip=method.clip,
        num_parameters=problem.task.num_parameters,
        noise_variance=variance,
        gradient_variance=bound_gradient_variance(
            method.clip, n, None if query is None else query.batch_size
        ),
    )
    # A schedule that falls begins as much higher as its average over the steps is lower.
    shape = make_schedule(1.0, schedule)
    mean = float(np.mean([shape.at(step, num_steps) for step in range(1, num_steps + 1)]))
    return nearest_place(expected / mean)


def step_size_at(place: int) -> float:
    """Return a member of the series.

    >>> [step_size_at(place) for place in (-3, -1, 0, 1, 5)]
    [0.1, 0.5, 1.0, 2.0, 50.0]
    """
    decade, digit = divmod(place, len(_MANTISSAS))
    # Read from text: a product with a rounded power of ten need not print as 0.2 or 0.05.
    return float(f"{_MANTISSAS[digit]}e{decade}")


def nearest_place(step_size: float) -> int:
    """Return the place of the member nearest to a step size.

    >>> nearest_place(0.5), nearest_place(1.1)
    (-1, 0)
    """
    # Three places per decade, so that places are nearly logarithms.
    return round(len(_MANTISSAS) * math.log10(step_size))


def _schedule_at(place: int, name: ScheduleName) -> Schedule:
    return make_schedule(step_size_at(place), name)


def _name_checkpoint(path: Path | None, number: int) -> Path | None:
    # Each round has other trials, and a checkpoint fits one list of trials only.
    return path if path is None or number == 1 else path.with_name(f"{path.name}.{number}")
