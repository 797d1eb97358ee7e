"""Tasks to train: the paper's quadratic, classifiers, and any module of the user's."""

from corn.learn.tasks.module import MeanLoss as MeanLoss
from corn.learn.tasks.module import ModuleTask as ModuleTask
from corn.learn.tasks.module import small_cnn as small_cnn
from corn.learn.tasks.module import small_cnn_task as small_cnn_task
from corn.learn.tasks.paper import LinearClassifier as LinearClassifier
from corn.learn.tasks.paper import Quadratic as Quadratic
from corn.learn.tasks.paper import ShallowNetwork as ShallowNetwork
from corn.learn.tasks.protocol import Gradients as Gradients
from corn.learn.tasks.protocol import Scores as Scores
from corn.learn.tasks.protocol import Task as Task
from corn.learn.tasks.protocol import place_task as place_task
