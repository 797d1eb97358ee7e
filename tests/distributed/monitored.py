"""A state of an agent, for tests of what shows it."""

import time
from dataclasses import replace
from typing import Any

from corn.distributed.status import TRAINING, AgentState


def make_state(**changes: Any) -> AgentState:
    state = AgentState(
        agent=2,
        num_agents=5,
        names=(),
        phase=TRAINING,
        step=120,
        num_steps=400,
        epsilon=3.21,
        promised_epsilon=10.0,
        delta=1e-5,
        unit="sample",
        protects='one sample; <each> gradient is "clipped" to 0.1',
        adversary="an eavesdropper together with one insider",
        simulation="",
        releases_left=280,
        neighbours=(0, 4),
        lost={"1": 97},
        bytes_sent=1_500_000,
        steps_per_minute=640.0,
        test_loss=0.25,
        plan="ab" * 32,
        corn_version="0.1.0",
        timeout=60.0,
        updated=time.time(),
    )
    return replace(state, **changes)
