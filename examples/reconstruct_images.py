"""Reconstruct agents' training images from their releases: without noise, with LDP, with CorN.

``python examples/reconstruct_images.py [--task mnist] [--graph SPEC] [--plot digits.png]``. Every
agent has one image and trains a linear classifier. The attacker reads all messages and knows all
other images. The last row is CorN's noise with one seed for all agents, designed against an
eavesdropper, and attacked by an insider that it was not designed for.

What an agent sends depends on what it received before, so that messages of neighbours carry the
gradients of agents far away. With step size η and gradients g that hardly change, neighbour j sends

    m_t = Wᵗ x₀ − η Σ_{k ≤ t} Wᵏ g      (row j),

which is linear in g. All these rows together are the knowledge matrix of the observers. Without
noise, every agent whose unit vector is in its row space is known exactly.

**Images.** The gradient of a linear classifier at one sample is an outer product: the residual of
the classes times the image. So one release without noise shows the image and its label. With noise,
an attacker averages over all steps, subtracts the noise it knows, and predicts the rest from other
agents' releases as well as the covariance of the noise allows: the estimate is that of generalised
least squares. Then it uses what public images look like: the estimate is moved to where the data
set's mean and covariance make it likely, by as much as the noise that is left requires.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from corn import make_plan
from corn.audit import View, find_smallest_break
from corn.audit.views import StreamWeights, invert_hidden, list_worst_views
from corn.checks import FloatArray, require_count
from corn.covariance import EAVESDROPPER, Decomposition, ThreatModel
from corn.errors import InvalidArgumentError
from corn.learn import Dataset, load_dataset
from corn.learn.batches import AgentData, Batch
from corn.learn.mechanism import Mechanism, Trial
from corn.learn.perturbation import simulation_nonce
from corn.learn.problem import SweepSettings
from corn.learn.schedule import Constant
from corn.learn.simulation import Simulation
from corn.learn.step import compute_gradients
from corn.learn.tasks import LinearClassifier, Task
from corn.noise import SecureSource, simulated_keys
from corn.noise.stream import list_terms
from corn.privacy import PrivacyBudget
from corn.report.figures import save_figure
from corn.topology import Network, load_network

KNOWLEDGE_STEPS = 30
# Relative, of singular values: smaller ones are rounding errors of directions not observed.
_RANK_TOLERANCE = 1e-10
# A squared length this close to one counts as one.
_EXACT = 1e-6


def list_observed(mixing_matrix: FloatArray, coalition: Sequence[int]) -> list[int]:
    """Return the agents whose messages a coalition receives, and its own members."""
    members = sorted(set(coalition))
    if not members or members[0] < 0 or members[-1] >= len(mixing_matrix):
        raise InvalidArgumentError(
            f"coalition must be of agents 0 … {len(mixing_matrix) - 1}, found {members}"
        )
    # Agent i gives weight w_ij to messages of agent j: it receives those of nonzero columns.
    heard = np.flatnonzero(np.abs(mixing_matrix[members]).sum(axis=0)).tolist()
    return sorted({*heard, *members})


def make_knowledge(
    mixing_matrix: FloatArray, observed: Sequence[int], num_steps: int
) -> FloatArray:
    """Return the knowledge matrix, shape (steps · observed, n): the rows Σ_{k ≤ t} Wᵏ of each step.

    >>> W = np.full((2, 2), 0.5)
    >>> make_knowledge(W, [0], 2).tolist()
    [[1.0, 0.0], [1.5, 0.5]]
    """
    require_count("num_steps", num_steps)
    power, total, rows = np.eye(len(mixing_matrix)), np.zeros_like(mixing_matrix), []
    for _ in range(num_steps):
        # Message t has row Σ_{k ≤ t} Wᵏ, beginning with W⁰ = I: the first is sent before any
        # mixing.
        total = total + power
        rows.append(total[list(observed)])
        power = power @ mixing_matrix
    return np.concatenate(rows)


def find_recoverable(knowledge: FloatArray) -> list[int]:
    """Return the agents whose gradients follow from what is observed, without noise."""
    _, values, right = np.linalg.svd(knowledge, full_matrices=False)
    space = right[values > _RANK_TOLERANCE * values[0]]
    # The part of each unit vector within the row space has length one where all of it is inside.
    inside = (space**2).sum(axis=0)
    return np.flatnonzero(inside > 1 - _EXACT).tolist()


# Small, so that gradients hardly change over the run: the best case of the attacker.
_STEP_SIZE = 1e-3


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Images that an attacker computed from releases, next to the true ones.

    Attributes:
        images: shape (victims, features), of norm one together with the constant feature.
        labels: shape (victims,).
        similarity: shape (victims,): cosine of the angle between each image and the true one, both
            without the average public image: 1 for the same image, near 0 for an unrelated one.
    """

    images: FloatArray
    labels: NDArray[np.int64]
    similarity: FloatArray


@dataclass(frozen=True, eq=False)
class ImagePrior:
    """Mean and covariance of public images, each scaled to norm one with its constant feature."""

    mean: FloatArray
    covariance: FloatArray

    @classmethod
    def from_images(cls, images: FloatArray) -> ImagePrior:
        """Measure images, shape (images, features)."""
        scaled = normalise_images(images)
        return cls(scaled.mean(axis=0), np.cov(scaled, rowvar=False))

    def denoise(self, image: FloatArray, noise_std: float) -> FloatArray:
        """Return the best linear estimate of an image that was observed with this noise."""
        noisy = self.covariance + noise_std**2 * np.eye(len(self.mean))
        # A direction without variance and without noise stays as it was observed.
        gain = self.covariance @ np.linalg.pinv(noisy, hermitian=True)
        # The Wiener filter: between the observation and the mean, by the share of variance that is
        # noise.
        estimate: FloatArray = self.mean + gain @ (image - self.mean)
        return estimate if noise_std > 0 else image


def normalise_images(images: FloatArray) -> FloatArray:
    """Append the constant feature and scale to norm one: what clipped gradients show."""
    full = np.column_stack([np.asarray(images, np.float64), np.ones(len(images))])
    scaled: FloatArray = full / np.linalg.norm(full, axis=1, keepdims=True)
    return scaled


def choose_images(dataset: Dataset, num_agents: int, *, seed: int) -> tuple[AgentData, ImagePrior]:
    """Give every agent one image, and measure all other images, which are public.

    Classes take turns, and images are drawn at random.
    """
    # The first word separates these draws from others of the same seed.
    generator = np.random.default_rng([4, seed])
    rows = [
        int(generator.choice(np.flatnonzero(dataset.targets == agent % dataset.num_classes)))
        for agent in range(num_agents)
    ]
    inputs, targets = (
        torch.from_numpy(dataset.inputs[rows]),
        torch.from_numpy(dataset.targets[rows]),
    )
    # Without the victims' images: a prior that has seen them would not need the releases.
    public = np.delete(dataset.inputs, rows, axis=0).astype(np.float64)
    data = AgentData(inputs, targets, tuple(range(num_agents + 1)))
    return data, ImagePrior.from_images(public)


def reconstruct_images(
    method: Mechanism,
    network: Network,
    data: AgentData,
    *,
    num_classes: int,
    num_steps: int,
    view: View,
    victims: list[int],
    prior: ImagePrior,
    seed: int = 0,
    track: Callable[[range], Iterable[int]] = iter,
) -> Reconstruction:
    """Run a method on agents with one image each, and reconstruct the images of victims.

    Args:
        method: with or without noise.
        network: the agents.
        data: one image per agent.
        num_classes: of the labels.
        num_steps: T, all of which the attacker observes.
        view: the attacker.
        victims: agents outside the view.
        prior: what images look like, from public ones.
        seed: of the run's keys.
        track: shows the progress of a range of steps.
    """
    num_features = data.inputs.shape[1]
    # Without a penalty, which would add a multiple of the model to the outer product.
    task = LinearClassifier(num_features, num_classes, l2=0.0)
    # Keys of a seed, so that insiders can draw again the noise that they know.
    settings = SweepSettings(num_steps, batch_size=None, seeds=(seed,), noise_keys="seed")
    prepared = AgentData(task.prepare(data.inputs), data.targets, data.offsets)
    trial = Trial(method, Constant(_STEP_SIZE))
    simulation = Simulation(task, prepared, network, [trial], settings=settings)
    listener = _Listener(method, task, prepared, view, seed=seed)
    simulation.on_release = listener.observe
    for _ in track(range(num_steps)):
        simulation.advance()
    honest = view.honest(network.num_agents)
    gradients, noise_std = listener.estimate()
    images, labels = [], []
    for victim in victims:
        own = gradients[honest.index(victim)].reshape(num_classes, -1)
        image, label = invert_gradient(own, prior.mean)
        # A clipped gradient has norm C, and so has the image within it.
        noise = float(noise_std[honest.index(victim)])
        images.append(prior.denoise(image / method.clip, noise / method.clip))
        labels.append(label)
    found, truth = np.stack(images), normalise_images(data.inputs.numpy()[victims])
    # All digits resemble the average image, so that similarity counts what goes beyond it.
    similarity = _compare(found - prior.mean, truth - prior.mean)
    return Reconstruction(found[:, :-1], np.array(labels), similarity)


def invert_gradient(gradient: FloatArray, template: FloatArray) -> tuple[FloatArray, int]:
    """Return the image, up to a positive factor, and the label that fit a gradient best.

    Args:
        gradient: shape (classes, features + 1), the last column for the constant feature; of a
            linear classifier near zero, where all classes are equally likely.
        template: an average image with the constant feature: the right label resembles it most.

    >>> residual = np.full(4, 0.25) - np.eye(4)[2]
    >>> image, label = invert_gradient(np.outer(residual, [3.0, 0.0, 5.0, 1.0]), np.ones(4))
    >>> (image / image[-1]).round(6).tolist(), label
    ([3.0, 0.0, 5.0, 1.0], 2)
    """
    classes = len(gradient)
    # Rows: the residual of each possible label, of norm one.
    residuals = 1 / classes - np.eye(classes)
    residuals /= np.linalg.norm(residuals, axis=1, keepdims=True)
    # For the true label r̂ᵀ(r xᵀ) = ‖r‖ x with r̂ = r/‖r‖: noise of other directions is removed.
    candidates = residuals @ gradient
    # Residuals of different labels have the product −1/classes, so that a wrong label gives a
    # negative multiple of the image. Pixels are not negative: the template tells the sign.
    label = int((candidates @ template).argmax())
    return candidates[label], label


class _Listener:
    """Averages what is left of releases after all that is known about their noise.

    The strongest attacker knows all gradients but the victim's, and so the noise of other agents,
    from which it predicts the victim's.
    """

    def __init__(
        self, method: Mechanism, task: Task, data: AgentData, view: View, *, seed: int
    ) -> None:
        self._task, self._method = task, method
        self._view, self._seed = view, seed
        self._honest, self._count = view.honest(data.num_agents), 0
        ones = torch.ones(data.num_agents, 1)
        self._batch = Batch(data.inputs[:, None], data.targets[:, None], ones, is_average=True)
        d = task.num_parameters
        self._gradients = torch.zeros(data.num_agents, d, dtype=torch.float64)
        self._noise = torch.zeros_like(self._gradients)
        self._weights = torch.eye(len(self._honest), dtype=torch.float64)
        self._noise_std = np.zeros(len(self._honest))
        if isinstance(method.noise, Decomposition):
            streams = StreamWeights.of(method.noise)
            hidden = streams.hidden(streams.held_by(view.coalition))
            weights, self._noise_std = predict_noise(hidden[np.ix_(self._honest, self._honest)])
            self._weights = torch.from_numpy(weights)

    def observe(self, parameters: Tensor, released: Tensor) -> None:
        """Add one step; see ``Simulation.on_release``."""
        clip = torch.tensor([self._method.clip], dtype=torch.float64)
        found = compute_gradients(self._task, parameters[0], self._batch, clip, clips_samples=False)
        gradients = found.values[:, 0].double() * found.factors
        self._gradients += gradients
        # Released values are (seeds, agents, trials, d), here of one seed and one trial.
        self._noise += released[0, :, 0].double() - gradients
        if isinstance(self._method.noise, Decomposition):
            at = {"seed": self._seed, "step": self._count, "size": gradients.shape[1]}
            self._noise -= draw_known_noise(self._method.noise, self._view, **at)
        self._count += 1

    def estimate(self) -> tuple[FloatArray, FloatArray]:
        """Return honest agents' estimated gradients, shape (honest, d), and their noise, (honest,).

        The noise is the standard deviation of one coordinate.
        """
        # Σ_k w_jk (s_k − g_k) + g_j with w_jj = 1: the victim's own gradient cancels, so that the
        # estimate is from the victim's release and from other agents' noise.
        error = self._weights @ self._noise[self._honest]
        found: FloatArray = ((self._gradients[self._honest] + error) / self._count).numpy()
        # Steps have independent noise, so that the error of an average falls with √T.
        return found, self._noise_std / math.sqrt(self._count)


def _compare(images: FloatArray, truth: FloatArray) -> FloatArray:
    norms = [np.maximum(np.linalg.norm(each, axis=1), 1e-300) for each in (images, truth)]
    cosine: FloatArray = (images * truth).sum(axis=1) / (norms[0] * norms[1])
    return cosine


def draw_known_noise(
    noise: Decomposition, view: View, *, seed: int, step: int, size: int
) -> Tensor:
    """Return the part of a step's noise that a view knows in a simulation of a seed, (n, d)."""
    held = StreamWeights.of(noise).held_by(view.coalition)
    source = SecureSource(simulated_keys(noise, seed=seed))
    known = np.empty((noise.num_agents, size))
    for agent, own in enumerate(known):
        # The nonce is public: all agents of the run agree on it.
        terms = list_terms(noise, agent, nonce=simulation_nonce(seed), step=step)
        source.fill_sum(own, [term for term in terms if term[1].owner in held])
    return torch.from_numpy(known)


def predict_noise(covariance: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return weights and standard deviations of each agent's noise given that of all others.

    Row j of the weights times the noise of all is the error of the best prediction of v_j, whose
    standard deviation is entry j; 0 for agents that noise does not hide.
    """
    precision = invert_hidden(covariance)
    diagonal = np.diag(precision)
    exposed = np.isinf(diagonal)
    # v_j given all other noise has the mean −Σ_{k≠j} Y_jk v_k / Y_jj and the variance 1/Y_jj, where
    # Y is the precision.
    weights = precision / np.where(exposed, 1.0, diagonal)[:, None]
    # Projected to a direction without noise, the noise is zero, which gives v_j exactly.
    scale = np.sqrt(np.maximum(np.diag(covariance), np.finfo(float).tiny))
    correlations = covariance / np.outer(scale, scale)
    values, vectors = np.linalg.eigh(correlations)
    silent = vectors[:, values <= len(values) * np.finfo(float).eps * max(values[-1], 1.0)]
    projection = silent @ silent.T
    for j in np.flatnonzero(exposed):
        weights[j] = projection[j] * (scale[j] / scale) / projection[j, j]
    return weights, np.where(exposed, 0.0, 1 / np.sqrt(diagonal))


def plot_reconstructions(
    truth: FloatArray, rows: Sequence[tuple[str, FloatArray]], *, shape: tuple[int, int], title: str
) -> Figure:
    """Draw the true images of victims, and below them what attackers made of each method.

    Args:
        truth: shape (victims, features).
        rows: a caption and reconstructed images, of this shape, for each method.
        shape: height and width of an image.
        title: of the figure.
    """
    every = [("the agents' own images", truth), *rows]
    figure = Figure(
        figsize=(1.05 * len(truth) + 3.6, 1.12 * len(every) + 0.6), layout="constrained"
    )
    figure.suptitle(textwrap.fill(title, 130), fontsize=9, parse_math=False)
    grid = figure.subplots(len(every), len(truth), squeeze=False)
    for line, (caption, images) in zip(grid, every, strict=True):
        for axes, image in zip(line, images, strict=True):
            axes.imshow(image.reshape(shape), cmap="gray_r", interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
        line[0].set_ylabel(
            textwrap.fill(caption, 26),
            rotation=0,
            horizontalalignment="right",
            verticalalignment="center",
            fontsize=9,
            labelpad=10,
        )
    return figure


def make_scenes(network: Network, budget: PrivacyBudget) -> list[tuple[Mechanism, View, str]]:
    """Return each mechanism, its attacker, and the attacker in words."""
    inside = make_plan(network, budget, threat=ThreatModel(1))
    outside = make_plan(network, budget, threat=EAVESDROPPER)
    ldp = make_plan(network, budget, mechanism="ldp", threat=EAVESDROPPER)
    broken = find_smallest_break(outside)
    # A plan that no coalition breaks still gets a row; any agent will do as the insider.
    insider = View((network.num_agents - 1,)) if broken is None else broken[0]
    shared = Mechanism.from_plan(outside, name="CorN, one seed for all")
    return [
        (Mechanism.non_private(*budget.queries), View(), "anybody"),
        (Mechanism.from_plan(ldp, name="LDP"), View(), "anybody"),
        # The strongest attacker that the plan promises to withstand.
        (
            Mechanism.from_plan(inside, name="CorN"),
            list_worst_views(inside)[0],
            "an insider",
        ),
        (shared, insider, "an insider it was not designed for"),
    ]


def describe_knowledge(network: Network, insider: int) -> str:
    """Return how many gradients an insider recovers from messages without noise."""
    observed = list_observed(network.mixing_matrix, [insider])
    recovered = find_recoverable(make_knowledge(network.step_matrix, observed, KNOWLEDGE_STEPS))
    beyond = set(recovered) - set(observed)
    return (
        f"without noise, agent {insider} recovers the gradients of {len(beyond)} agents that are "
        f"not its neighbours from {KNOWLEDGE_STEPS} steps of its {len(observed) - 1} neighbours' "
        "messages"
    )


def main() -> None:
    """Attack each mechanism, print how similar the images are, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=["digits", "mnist"], default="digits")
    parser.add_argument("--graph", default="er:n=60,p=0.1,seed=1")
    parser.add_argument("--epsilon", type=float, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    # The attacker reads single releases, which masks hide under exact sums.
    network = load_network(options.graph, mixing="gossip")
    budget = PrivacyBudget(options.epsilon, 1e-5, num_steps=options.steps, clip=0.1)
    dataset = load_dataset(options.task)
    data, prior = choose_images(dataset, network.num_agents, seed=0)
    scenes = make_scenes(network, budget)
    # Nobody who attacks in one scene is a victim in another, so that rows show the same images.
    insiders = {agent for _, view, _ in scenes for agent in view.coalition}
    victims = [i for i in range(network.num_agents) if i not in insiders][: options.images]
    labels = data.targets.numpy()[victims]
    print(f"promise: {budget.describe()}")
    print(f"neighbours only: {describe_knowledge(network, min(insiders))}")
    print("similarity to the true image beyond the average image (1: the same, 0: unrelated)")
    rows = []
    for method, view, attacker in scenes:
        found = reconstruct_images(
            method,
            network,
            data,
            num_classes=dataset.num_classes,
            num_steps=options.steps,
            view=view,
            victims=victims,
            prior=prior,
            seed=0,
        )
        right = int((found.labels == labels).sum())
        rows.append((f"{method.name}; seen by {attacker}", found.images))
        print(
            f"{rows[-1][0]}: similarity {found.similarity.mean():.2f}, labels found {right} of "
            f"{len(labels)}"
        )
    if options.plot is not None:
        truth = data.inputs.numpy()[victims].astype(np.float64)
        title = f"Images that an attacker reconstructs from releases; {budget.describe()}"
        shape = dataset.image_shape or (1, data.inputs.shape[1])
        save_figure(plot_reconstructions(truth, rows, shape=shape, title=title), options.plot)


if __name__ == "__main__":
    main()
