"""Replaceable parts of an update: clipping, mixing, a local rule, and local steps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import corn
from corn.learn import Clipping, MixingRule


def clip_layers(model: nn.Module) -> Clipping:
    """Return the rule that clips the gradient of each of L parameters to C/√L.

    The norm of the whole is then at most C, and large layers do not shrink the others.
    """
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]

    def clip(gradient: Tensor, largest: Tensor) -> Tensor:
        most = largest / len(sizes) ** 0.5
        # The smallest positive number: a layer of zeros stays zero.
        least = torch.finfo(gradient.dtype).tiny
        parts = torch.split(gradient, sizes)
        norms = [torch.linalg.vector_norm(part).clamp(min=least) for part in parts]
        pairs = zip(parts, norms, strict=True)
        return torch.cat([part * (most / norm).clamp(max=1.0) for part, norm in pairs])

    return clip


def normalise(gradient: Tensor, clip: Tensor) -> Tensor:
    """Return the gradient scaled to norm C, however small it was."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return gradient * (clip / norm.clamp(min=torch.finfo(gradient.dtype).tiny))


def pair_at_random(network: corn.Network, *, seed: int = 0) -> MixingRule:
    """Return the rule by which random pairs of linked agents average their models in each step.

    Pairs are a random maximal matching of the links (one-peer gossip, Boyd and others 2006).
    """
    links = torch.tensor(list(network.graph.to_undirected().edges))

    def mix(models: Tensor, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        order = links[torch.randperm(len(links), generator=generator)].tolist()
        partner = torch.arange(models.shape[1])
        taken: set[int] = set()
        for first, second in order:
            if first not in taken and second not in taken:
                taken |= {first, second}
                partner[first] = second
                partner[second] = first
        return (models + models[:, partner.to(models.device)]) / 2

    return mix


def follow_graphs(*phases: tuple[int, corn.Network]) -> MixingRule:
    """Return the rule that mixes over each network for its number of steps, then from the start."""
    order = [torch.tensor(own.step_matrix) for count, own in phases for _ in range(count)]
    return lambda models, step: torch.matmul(order[step % len(order)].to(models), models)


class GradientTracking:
    """A local rule along an estimate of the average release of all agents.

    y ← W y + r − r', with the releases r of this step and r' of the one before, and
    x ← W (x − η y) (Di Lorenzo and Scutari 2016). It takes two messages over each link and step,
    and corrects for agents whose data differ.
    """

    def __init__(self) -> None:
        self.tracked: Tensor | None = None
        self.released: Tensor | None = None

    def take_step(
        self, models: Tensor, released: Tensor, step_size: Tensor, mix: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """See ``corn.learn.LocalRule``."""
        # A copy: the memory of releases is used again in the next step.
        released = released.clone()
        tracked = released
        if self.tracked is not None and self.released is not None:
            tracked = mix(self.tracked) + released - self.released
        self.tracked, self.released = tracked, released
        return mix(models - step_size * tracked)


class LocalSteps:
    """A task whose gradient is the mean of several gradient steps on the agent's own batch.

    The release clips the whole of it, so that the unit must be the agent: one sample changes all
    steps after it.
    """

    def __init__(self, task: Any, num_steps: int, step_size: float) -> None:
        self.task, self.num_steps, self.step_size = task, num_steps, step_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def gradient(self, parameters: Tensor, batch: Any, *, sample_clip: Tensor | None = None) -> Any:
        """Return the distance that the steps moved, divided by their number and size."""
        if sample_clip is not None:
            raise ValueError("local steps need a budget with unit 'agent'")
        current = parameters
        for _ in range(self.num_steps):
            found = self.task.gradient(current, batch)
            current = current - self.step_size * found.values
        return replace(found, values=(parameters - current) / (self.num_steps * self.step_size))


if __name__ == "__main__":
    ring = corn.load_network("ring:4", mixing="gossip")
    model = nn.Linear(3, 2)
    samples = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
    rules: dict[str, Any] = {"clipping": clip_layers(model), "mixing": pair_at_random(ring)}
    given: dict[str, Any] = {"model": model, "loss": nn.functional.cross_entropy, **rules}
    budget = corn.PrivacyBudget(5, 1e-5, num_steps=20, clip=0.1)
    result = corn.train(ring, budget, datasets=samples, local_rule=GradientTracking, **given)
    print(result.privacy)
