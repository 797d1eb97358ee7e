"""Tasks to train: the paper's quadratic, classifiers, and any module of the user's."""

from corn.learn.tasks.module import MeanLoss, ModuleTask, small_cnn, small_cnn_task
from corn.learn.tasks.paper import LinearClassifier, Quadratic, ShallowNetwork
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
    "small_cnn",
    "small_cnn_task",
]
