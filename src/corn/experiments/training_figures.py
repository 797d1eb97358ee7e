"""Figures 3 to 5: what models reach, against ε and against connectivity."""

from __future__ import annotations

from corn.experiments.cells import TrainingCell
from corn.experiments.methods import METHODS
from corn.experiments.places import Place
from corn.experiments.scale import Scale, Training
from corn.experiments.studies import Panel, TrainingStudy

_UNITS = {
    "agent": "unit: agent (the mini-batch gradient is clipped once)",
    "sample": "unit: sample (each sample's gradient is clipped)",
}
_ADVERSARY = "against an eavesdropper or as named"


def figure3(scale: Scale, panel: str) -> list[TrainingStudy]:
    """Quadratic optimisation."""
    return [_study(scale, scale.quadratic, panel, "fig3", "optimality_gap", "optimality gap")]


def figure4(scale: Scale, panel: str) -> list[TrainingStudy]:
    """Logistic regression."""
    return [_study(scale, scale.regression, panel, "fig4", "test_loss", "test loss")]


def figure5(scale: Scale, panel: str) -> list[TrainingStudy]:
    """Image classification, once for each unit of privacy."""
    return [
        _study(scale, training, panel, "fig5", "test_accuracy", "test accuracy")
        for training in (scale.network, scale.softmax)
    ]


def _study(
    scale: Scale, training: Training, panel: str, figure: str, column: str, label: str
) -> TrainingStudy:
    if panel == "a":
        graph = scale.graph(scale.connectivity)
        places = [_place(scale, training, graph, eps, x=eps) for eps in scale.epsilons]
        settings, x_label = f"p = {scale.connectivity:g}", "privacy budget ε"
    else:
        places = [
            _place(scale, training, scale.graph(p), scale.epsilon, x=p)
            for p in scale.connectivities
        ]
        settings, x_label = f"ε = {scale.epsilon:g}", "connectivity p"
    name = f"{figure}{panel}" if figure != "fig5" else f"{figure}{panel}-{training.unit}"
    return TrainingStudy(
        Panel(
            name,
            f"{figure}{panel}",
            f"{_describe(training)}, n = {scale.num_agents}, {settings}, T = {training.num_steps}, "
            f"δ = {scale.delta:g}, {_UNITS[training.unit]}, {_ADVERSARY}",
            x_label,
            label,
            log_x=panel == "a",
            log_y=column == "optimality_gap",
            lower_is_better=column != "test_accuracy",
            is_random=True,
            unit=training.unit,
        ),
        column,
        tuple(places),
    )


def _describe(training: Training) -> str:
    names = {"network": "784–32–10 network", "linear": "softmax regression"}
    if training.task == "quadratic":
        return "quadratic from its minimiser"
    model = names.get(training.model or "", "logistic regression")
    if training.task == "digits":
        model = model.replace("784", "64")
    return f"{training.task}, {model}"


def _place(scale: Scale, training: Training, graph: str, epsilon: float, *, x: float) -> Place:
    pilots = tuple(
        TrainingCell(
            task=training.task,
            model=training.model,
            unit=training.unit,
            graph=graph,
            epsilon=float(epsilon),
            methods=METHODS,
            num_steps=training.num_steps,
            step_sizes=tuple(map(float, training.step_sizes)),
            schedule=training.schedule,
            seeds=seeds,
            delta=scale.delta,
            clip=scale.clip,
            batch_size=scale.batch_size,
            partition=scale.partition,
            data_seed=scale.data_seed,
        )
        for seeds in training.pilot_blocks
    )
    return Place(x, pilots, training.repeat_blocks)
