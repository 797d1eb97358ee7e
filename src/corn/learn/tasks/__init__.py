"""Tasks to train: the paper's quadratic, classifiers, and any module of the user's."""

from corn.learn.tasks.module import MeanLoss, ModuleTask, small_cnn, small_cnn_task
from corn.learn.tasks.paper import LinearClassifier, Quadratic, ShallowNetwork, quadratic_objectives
from corn.learn.tasks.protocol import Gradients, Scores, Task, place_task

__all__ = [
    "Gradients",
    "LinearClassifier",
    "MeanLoss",
    "ModuleTask",
    "Quadratic",
    "Scores",
    "ShallowNetwork",
    "Task",
    "place_task",
    "quadratic_objectives",
    "small_cnn",
    "small_cnn_task",
]
