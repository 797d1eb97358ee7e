"""Success rate of an attacker that identifies the gradient of a message by its low-order bits.

Run ``python benchmarks/float_attack.py [--trials N] [--release NAME] [--only TEXT]
[--processes N]``.

The attacker (``tests/oracles/low_order_bits.py``) knows the plan, the model, the step size and two
candidate gradients, and trains on releases with keys of its own. It observes all messages, knows
all other gradients, and is an insider if the plan's threat has one. Ideal noise allows a success
rate of Φ(μ/2); the verdict is by a binomial test. The column ``values`` shows how often
the best test for ideal noise is right alone.

Releases are the library's, or with ``--release sum`` an unsafe alternative, which draws and adds
NumPy's normals in the type of messages, without a grid.

``--processes N`` runs six real agents N times for one step, with one label of one agent flipped or
not, and attacks the messages on their links.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest, norm

# The attacker belongs to the tests, which are not part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from corn import Plan, PrivacyBudget, ThreatModel, load_network, make_plan
from corn.distributed import RunSettings
from corn.distributed.agent import prepare_work
from corn.learn.batches import SeededChoices
from corn.learn.problem import TrainingProblem
from corn.learn.schedule import Constant
from corn.learn.workloads import Workload, select_agents
from corn.noise import NoiseSource, SecureSource, draw_share, simulated_keys
from corn.plan import FloatType
from corn.threads import limit_threads
from tests.audit.recording import AgentPool
from tests.oracles.deployed_release import (
    NONCE,
    Floats,
    GivenNoise,
    Observer,
    OwnReleases,
    Release,
    Sent,
    release,
    stream_weights,
)
from tests.oracles.low_order_bits import Array, FloatAttacker, Pair

CLIP = 0.1
STEP_SIZE = 0.25
NUM_PAIRS = 4
BROKEN_BELOW = 1e-4
"""The p-value below which a promise counts as broken."""
TRIAL_KEYS = 10**6
"""The first seed of other agents' keys; smaller seeds are of the attacker's own keys."""


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        noise: ``ldp``, or ``pairs`` for a default plan of 20 agents.
        message_type: in which messages are sent.
        num_parameters: d.
        model_scale: the standard deviation of the public model.
        num_steps: that the attacker sees.
        planned_steps: T.
    """

    noise: str
    message_type: FloatType
    num_parameters: int
    model_scale: float = 0.0
    num_steps: int = 1
    planned_steps: int = 500

    def __str__(self) -> str:
        model = f"x ~ {self.model_scale:g}" if self.model_scale else "x = 0"
        return (
            f"{self.noise}, T={self.planned_steps}, {self.message_type}, d={self.num_parameters}, "
            f"{model}, {self.num_steps} step{'s' * (self.num_steps > 1)}"
        )

    def make_plan(self) -> Plan:
        """Make the plan under which the message is sent."""
        budget = PrivacyBudget(10, 1e-5, num_steps=self.planned_steps, clip=CLIP)
        if self.noise == "ldp":
            ring, nobody = load_network("ring:4", mixing="gossip"), ThreatModel()
            return make_plan(ring, budget, mechanism="ldp", threat=nobody, dtype=self.message_type)
        network = load_network("er:20,p=0.2,seed=1", mixing="gossip")
        return make_plan(network, budget, dtype=self.message_type)


def list_settings() -> Iterator[Setting]:
    for noise in ("ldp", "pairs"):
        for message_type in ("float32", "float64"):
            own = Setting(noise, message_type, 31)
            for num_parameters in (31, 1000, 10_000):
                for model_scale in (0.0, 0.1):
                    yield replace(own, num_parameters=num_parameters, model_scale=model_scale)
            yield replace(own, planned_steps=5000)
            yield replace(own, num_steps=10)
            yield replace(own, num_steps=10, model_scale=0.1)
            yield replace(own, num_parameters=1000, num_steps=10, model_scale=1.0)


@dataclass(frozen=True)
class Result:
    """The number of right decisions, by all evidence and by the values alone."""

    setting: str
    trials: int
    right: int
    right_by_values: int
    promised: float
    num_views: int
    seconds: float

    @property
    def p(self) -> float:
        """The probability to be right this often, or more often, where the promise holds."""
        found = binomtest(self.right, self.trials, self.promised, alternative="greater")
        return float(found.pvalue)

    @property
    def verdict(self) -> str:
        """Return in words whether the promise was kept, as far as this many trials can tell."""
        return "BROKEN" if self.p < BROKEN_BELOW else "kept"

    def __str__(self) -> str:
        return (
            f"{self.setting:<62}{self.right:>6} of {self.trials:<6}{self.right / self.trials:>7.1%}"
            f"{self.right_by_values / self.trials:>9.1%}{self.promised:>10.1%}{self.p:>10.1e}"
            f"{self.num_views:>7}{self.seconds:>7.0f}  {self.verdict}"
        )


HEADER = (
    f"{'setting':<62}{'right':>6}    {'trials':<6}{'':>7}{'values':>9}{'promised':>10}{'p':>10}"
    f"{'views':>7}{'s':>7}"
)


def draw_pair(setting: Setting, generator: np.random.Generator) -> Pair:
    """Draw two clipped gradients as far apart as the promise allows."""
    g = generator.standard_normal(setting.num_parameters)
    g = (g * CLIP / np.linalg.norm(g)).astype(setting.message_type).astype(np.float64)
    return g, -g


def attack(setting: Setting, plan: Plan, *, num_trials: int, make_message: Release) -> Result:
    """Train the attacker, then let it decide about messages with keys of others."""
    # Every row has trials of its own: rows would otherwise share their luck.
    row = zlib.crc32(str(setting).encode())
    began, generator = time.perf_counter(), np.random.default_rng(row)
    d, message_type = setting.num_parameters, setting.message_type
    agent = 0
    observer = Observer(plan, agent, find_worst_insider(plan, agent))
    model = generator.normal(0, setting.model_scale, d).astype(message_type)
    sent = Sent(model.astype(np.float64), STEP_SIZE)
    attacker = FloatAttacker(
        OwnReleases(plan, agent, sent, make_message),
        [draw_pair(setting, generator) for _ in range(NUM_PAIRS)],
        noise_std=observer.noise_std,
        weights=stream_weights(plan.decomposition, agent),
        model=sent.model,
        step_size=STEP_SIZE,
        num_messages=min(max(60_000 // d, 25), 1000),
    )
    right = right_by_values = 0
    for trial in range(num_trials):
        source = SecureSource(simulated_keys(plan.decomposition, seed=row * TRIAL_KEYS + trial))
        truth, bits, values = int(generator.integers(2)), 0.0, 0.0
        for step in range(setting.num_steps):
            pair = draw_pair(setting, generator)
            message = make_message(plan, agent, pair[truth], source, step, sent)
            released = sent.recover(message)[np.newaxis]
            bits += float(attacker.score_bits(pair, released)[0])
            predicted = observer.predict(source, step, d)
            values += float(attacker.score_values(pair, released, predicted)[0])
        right += (bits + values > 0) == truth
        right_by_values += (values > 0) == truth
    return Result(
        str(setting),
        num_trials,
        right,
        right_by_values,
        promise_of(plan, setting.num_steps),
        len(attacker.views),
        time.perf_counter() - began,
    )


def promise_of(plan: Plan, num_steps: int) -> float:
    """Return Φ(μ/2) after this many steps: the success rate of the best test on ideal noise."""
    mu = plan.budget.query.sensitivity * math.sqrt(num_steps * plan.precision_caps.max())
    return float(norm.cdf(mu / 2))


def find_worst_insider(plan: Plan, agent: int) -> int | None:
    """Return the insider with most of the agent's noise; None for a plan without insiders."""
    if plan.threat.max_colluders == 0:
        return None
    others = [other for other in range(plan.num_agents) if other != agent]
    return min(others, key=lambda other: Observer(plan, agent, other).noise_std)


def release_sum(
    plan: Plan, agent: int, gradient: Array, source: NoiseSource, step: int, sent: Sent
) -> Floats:
    """Release g + v as a plain sum, drawn and added in the type of messages; see :func:`release`.

    As most programs do it: normals of NumPy, times a weight, stream after stream.
    """
    real = np.dtype(plan.dtype).type
    s = np.zeros(len(gradient), real)
    # Seeds from the keys of the trial, which is all that the streams of it must have in common.
    seed = draw_share(plan.decomposition, agent, source=source, nonce=NONCE, step=step, stop=1)
    normals = np.random.Generator(np.random.SFC64(seed.view(np.uint64)))
    for weight in stream_weights(plan.decomposition, agent):
        s += real(weight) * normals.standard_normal(len(gradient), dtype=real)
    s += gradient.astype(real)
    return np.asarray(np.asarray(sent.model, real) - real(sent.step_size) * s)


RELEASES: dict[str, Release] = {
    "deployed": release,
    "sum": release_sum,
}


# Real processes: one label of one agent is flipped or not, and the attacker reads the links.

NUM_AGENTS, VICTIM = 6, 0


@dataclass(frozen=True)
class FlippedWorkload(Workload):
    """The same data, in which the first label of one agent may be flipped."""

    is_flipped: bool = False

    def build(self, num_agents: int, agents: Sequence[int] | None = None) -> TrainingProblem:
        """See ``Workload``."""
        problem = super().build(num_agents)
        if self.is_flipped:
            targets = problem.data.targets.clone()
            first = problem.data.offsets[VICTIM]
            targets[first] = targets.min() + targets.max() - targets[first]
            problem = replace(problem, data=replace(problem.data, targets=targets))
        return problem if agents is None else select_agents(problem, agents)


def attack_processes(num_trials: int, message_type: FloatType = "float32") -> Result:
    """Run six agents many times, and decide from the victim's message which data it had."""
    began, generator = time.perf_counter(), np.random.default_rng(2)
    budget = PrivacyBudget(10, 1e-5, num_steps=500, clip=CLIP)
    plan = make_plan(
        load_network(f"ring:{NUM_AGENTS}", mixing="gossip"), budget, dtype=message_type
    )
    settings = RunSettings(Constant(STEP_SIZE), num_steps=1, timeout=60, evaluate_at=(0,))
    workload = FlippedWorkload("breast-cancer", partition="iid")
    pair, model = find_candidates(plan, settings, workload)
    sent = Sent(model, STEP_SIZE)
    std = math.sqrt(plan.decomposition.covariance[VICTIM, VICTIM])
    attacker = FloatAttacker(
        OwnReleases(plan, VICTIM, sent),
        [pair],
        noise_std=std,
        weights=stream_weights(plan.decomposition, VICTIM),
        model=model,
        step_size=STEP_SIZE,
        num_messages=4000,
    )
    right = right_by_values = 0
    with tempfile.TemporaryDirectory() as folder, AgentPool(NUM_AGENTS) as pool:
        for trial in range(num_trials):
            truth, own = int(generator.integers(2)), Path(folder) / str(trial)
            chosen = replace(workload, is_flipped=bool(truth))
            run = pool.run(plan, chosen, settings, keys=own / "keys", out=own / "run")
            released = sent.recover(run.messages[0, VICTIM])[np.newaxis]
            values = attacker.score_values(pair, released)[0]
            right += (attacker.score_bits(pair, released)[0] + values > 0) == truth
            right_by_values += (values > 0) == truth
    return Result(
        f"six processes on a ring, a label flipped, d={len(pair[0])}",
        num_trials,
        int(right),
        int(right_by_values),
        promise_of(plan, 1),
        len(attacker.views),
        time.perf_counter() - began,
    )


def find_candidates(
    plan: Plan, settings: RunSettings, workload: FlippedWorkload
) -> tuple[Pair, Array]:
    """Compute the clipped gradients of both data sets at the initial model, and that model."""
    found = []
    for is_flipped in (False, True):
        problem = replace(workload, is_flipped=is_flipped).build(plan.num_agents)
        own = select_agents(problem, [VICTIM])
        ledger: Any = SimpleNamespace(make_choices=lambda _: SeededChoices(0), reserve=lambda k: k)
        stepper, _, _ = prepare_work(plan, VICTIM, settings, own, ledger)
        start = own.task.initialize(settings.seed).to(getattr(torch, plan.dtype))
        # Without noise, on a grid so fine that nothing is lost: linear models start at 0.
        silence: Any = GivenNoise(torch.zeros(len(start)).double(), 2.0**-60)
        stepper.begin(0, silence, start)
        stepper.differentiate(own.task)
        half = stepper.release_half_step(step_size=1.0)
        found.append((start - half).double().numpy())
    return (found[0], found[1]), start.double().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="messages or runs per setting")
    parser.add_argument("--release", choices=RELEASES, default="deployed")
    parser.add_argument("--only", default="", help="settings that contain this text")
    parser.add_argument("--processes", type=int, default=0, help="runs of real processes")
    options = parser.parse_args()
    limit_threads()
    print(f"release: {options.release}\n{HEADER}", flush=True)
    plans: dict[tuple[str, str, int], Plan] = {}
    for setting in list_settings():
        if options.only in str(setting) and options.trials:
            key = setting.noise, setting.message_type, setting.planned_steps
            plan = plans.setdefault(key, plans.get(key) or setting.make_plan())
            make_message = RELEASES[options.release]
            found = attack(setting, plan, num_trials=options.trials, make_message=make_message)
            print(found, flush=True)
    if options.processes:
        print(attack_processes(options.processes), flush=True)


if __name__ == "__main__":
    # Agents' processes load the workload from a module of this name.
    import float_attack

    float_attack.main()
