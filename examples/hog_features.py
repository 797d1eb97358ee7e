"""Twenty hospitals train softmax regression on fixed oriented-gradient features at a small ε.

Run ``CORN_DATA=DIRECTORY .venv/bin/python examples/hog_features.py``. A histogram of oriented
gradients (HOG, Dalal and Triggs 2005) of an image is a fixed, public function of that image alone:
computing it costs no privacy, and a linear model of it learns from far noisier gradients than a
model of pixels. Exact sums give all hospitals one model, whose noise is 20/19 of a trusted
server's, also against a curious hospital. With MNIST (``corn data get mnist``) one image is
protected with ε = 0.1. Without it the script says so, and takes 1,797 small embedded digits and
ε = 4. It takes about 20 s with MNIST, and a few seconds without.
"""

import numpy as np
import torch
from torch import nn

import corn
from corn import CornError
from corn.learn import Dataset, load_dataset, partition_samples
from corn.privacy import round_up

NUM_HOSPITALS, NUM_STEPS, STEP_SIZE = 20, 120, 4.0
ANGLES = 9
AT_ONCE = 2000  # images, so that memory stays small


def compute_features(images: np.ndarray) -> np.ndarray:
    """Return histograms of gradient directions, shape (images, features), of (images, h, w)."""
    pieces = np.array_split(images, -(-len(images) // AT_ONCE))
    return np.concatenate([compute_piece(piece) for piece in pieces])


def compute_piece(images: np.ndarray) -> np.ndarray:
    """Return the features of as many images as fit into memory at once."""
    count, height, width = images.shape
    # Cells of 4×4 pixels for images of 28×28, and of 2×2 for smaller ones.
    side = 4 if min(height, width) >= 28 else 2
    shape = (count, height // side, side, width // side, side)
    by_row, by_column = np.gradient(images.astype(np.float32), axis=(1, 2))
    strength = np.hypot(by_row, by_column)
    # Directions without sign, in units of one bin; an angle counts for the two bins beside it.
    angle = np.arctan2(by_row, by_column) % np.pi * (ANGLES / np.pi)
    bins = []
    for bin_number in range(ANGLES):
        distance = np.abs(angle - bin_number)
        distance = np.minimum(distance, ANGLES - distance)
        weights = strength * np.maximum(0, 1 - distance)
        bins.append(weights.reshape(shape).sum(axis=(2, 4)).reshape(count, -1))
    # The root weakens the strongest edges. A norm of 2 makes the features count for more than the
    # constant one, since a gradient is clipped as a whole.
    features = np.sqrt(np.concatenate(bins, axis=1))
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(2 * features / np.maximum(norms, 1e-6))


def load_images() -> tuple[Dataset, float]:
    """Return MNIST and ε = 0.1, or the embedded digits and ε = 4."""
    try:
        return load_dataset("mnist"), 0.1
    except CornError as error:
        print(f"{error}. The embedded digits take its place, with ε = 4 for so few images.")
        return load_dataset("digits"), 4.0


def main() -> None:
    """Train on pixels and on features with the same promise, and compare."""
    dataset, epsilon = load_images()
    order = np.random.default_rng(1).permutation(len(dataset.targets))
    train, test = np.split(order, [int(0.8 * len(order))])
    parts = partition_samples("iid", dataset.targets[train], NUM_HOSPITALS, seed=1)
    # Each hospital draws a twentieth of its images at a step, by coins.
    smallest = min(map(len, parts))
    budget = corn.PrivacyBudget(
        epsilon,
        delta=1e-5,
        num_steps=NUM_STEPS,
        clip=1.0,
        unit="sample",
        batch_size=smallest // 20,
        samples_per_agent=smallest,
    )
    network = corn.load_network("er:n=20,p=0.2,seed=1", mixing="sum")
    images = dataset.inputs.reshape(-1, *(dataset.image_shape or ()))
    inputs = {"pixels": dataset.inputs, "features": compute_features(images)}
    targets = torch.from_numpy(dataset.targets)
    for name, values in inputs.items():
        tensor = torch.from_numpy(values)
        model = nn.Linear(tensor.shape[1], 10)
        # A public start, the same for all hospitals.
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        # Each of the two runs is a release of its own: both together would spend about twice ε.
        row = corn.train(
            corn.make_plan(network, budget),
            model=model,
            loss=nn.functional.cross_entropy,
            datasets=[(tensor[train[part]], targets[train[part]]) for part in parts],
            test=(tensor[test], targets[test]),
            step_size=STEP_SIZE,
            momentum=0.9,
            evaluate_at=[NUM_STEPS],
            secure=True,
        ).last_rows[0]
        spent = round_up(float(row["epsilon"]))
        print(f"{name:8s} test accuracy {row['test_accuracy']:.3f}, ε spent {spent}")
    print(f"One image is protected at δ = {budget.delta:g}, against one curious hospital.")


if __name__ == "__main__":
    main()
