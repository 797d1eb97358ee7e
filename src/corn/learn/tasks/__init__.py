"""What is trained: the paper's quadratic, linear models, networks, and any module of the user's."""

from corn.learn.tasks.flat_module import Loss
from corn.learn.tasks.linear import LinearClassifier
from corn.learn.tasks.module import ModuleTask
from corn.learn.tasks.networks import small_cnn, small_cnn_task
from corn.learn.tasks.perceptron import ShallowNetwork
from corn.learn.tasks.protocol import Gradients, HasFingerprint, Scores, Task
from corn.learn.tasks.quadratic import Quadratic, quadratic_objectives

__all__ = [
    "Gradients",
    "HasFingerprint",
    "LinearClassifier",
    "Loss",
    "ModuleTask",
    "Quadratic",
    "Scores",
    "ShallowNetwork",
    "Task",
    "quadratic_objectives",
    "small_cnn",
    "small_cnn_task",
]
