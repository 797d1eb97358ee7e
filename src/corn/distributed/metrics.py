"""Metrics of an agent in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from corn.distributed.board import Snapshot
from corn.privacy.rounding import write_exactly
from corn.version import __version__

Sample = tuple[Mapping[str, str], float]


def render_metrics(snapshot: Snapshot, *, show_private: bool = False) -> str:
    """Return all metrics of an agent; private ones only if asked for."""
    lines: list[str] = []
    for name, kind, text, samples in _list_metrics(snapshot, show_private=show_private):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_render_labels(labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _list_metrics(
    snapshot: Snapshot, *, show_private: bool
) -> Iterator[tuple[str, str, str, list[Sample]]]:
    agent = {"agent": str(snapshot.agent)}

    def one(value: float, **labels: str) -> list[Sample]:
        return [(agent | labels, float(value))]

    yield (
        "corn_info",
        "gauge",
        "Version and phase.",
        one(1, version=__version__, phase=snapshot.phase),
    )
    yield "corn_healthy", "gauge", "1 unless /healthz fails.", one(not snapshot.problem)
    state, local = snapshot.state, snapshot.local
    if state is None or local is None:
        return
    yield "corn_step", "gauge", "Steps done.", one(state.step)
    yield "corn_planned_steps", "gauge", "Steps to do.", one(state.num_steps)
    yield "corn_steps_per_minute", "gauge", "Over the last minute.", one(state.steps_per_minute)
    yield "corn_updated_seconds", "gauge", "Unix time of the last report.", one(state.updated)
    yield "corn_neighbours", "gauge", "Neighbours still linked.", one(len(state.neighbours))
    yield "corn_lost_agents", "gauge", "Agents lost so far.", one(len(state.lost))
    yield (
        "corn_lost_at_step",
        "gauge",
        "Step at which the loss of an agent was noticed.",
        [(agent | {"lost": lost}, float(step)) for lost, step in state.lost.items()],
    )
    yield "corn_sent_bytes_total", "counter", "Bytes sent to neighbours.", one(state.bytes_sent)
    yield (
        "corn_releases_left",
        "gauge",
        "Releases that the ledger still allows under this plan.",
        one(state.releases_left),
    )
    meaning = {
        "unit": state.unit,
        "protects": state.protects,
        "adversary": state.adversary,
        "simulation": state.simulation,
        "delta": write_exactly(state.delta),
    }
    if state.epsilon is not None:
        yield (
            "corn_epsilon_spent",
            "gauge",
            "Privacy loss so far under this plan, at most.",
            one(state.epsilon, **meaning),
        )
        yield (
            "corn_epsilon_promised",
            "gauge",
            "Privacy loss that the plan allows.",
            one(state.promised_epsilon, **meaning),
        )
    if state.test_loss is not None:
        yield "corn_test_loss", "gauge", "Of the model, on public data.", one(state.test_loss)
    if show_private:
        for name, value in asdict(local).items():
            text = "Private: depends on data without noise."
            yield f"corn_private_{name}", "gauge", text, one(value)


def _render_labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
