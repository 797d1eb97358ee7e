"""AUC, recall and calibration against scikit-learn and by definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, recall_score, roc_auc_score

from corn.learn.metrics import measure_quality


@pytest.mark.parametrize("num_classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_scikit_learn(num_classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    targets = np.concatenate([np.arange(num_classes), rng.integers(0, num_classes, 60)])
    # Rounded, so that scores tie.
    logits = rng.normal(size=(len(targets), num_classes)).round(1) + np.eye(num_classes)[targets]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = measure_quality(probabilities, targets)
    given_scores = probabilities[:, 1] if num_classes == 2 else probabilities
    assert found.auc == pytest.approx(roc_auc_score(targets, given_scores, multi_class="ovr"))
    chosen = probabilities.argmax(axis=1)
    np.testing.assert_allclose(found.recall, recall_score(targets, chosen, average=None))
    assert found.brier == pytest.approx(brier_score_loss(targets, given_scores))
    assert found.accuracy == pytest.approx((chosen == targets).mean())


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 1)), min_size=1, max_size=40))
def test_the_calibration_error_is_that_of_the_definition(pairs: list[tuple[float, int]]) -> None:
    second, targets = np.array([p for p, _ in pairs]), np.array([y for _, y in pairs])
    found = measure_quality(np.stack([1 - second, second], axis=1), targets)
    confidence = np.maximum(1 - second, second)
    hits = (second > 1 - second) == targets
    expected = 0.0
    for number in range(1, 16):
        inside = np.ceil(confidence * 15) == number
        if inside.any():
            expected += inside.mean() * abs(hits[inside].mean() - confidence[inside].mean())
    assert found.calibration_error == pytest.approx(expected, abs=1e-12)


def test_scores_that_are_not_defined_are_nan() -> None:
    found = measure_quality(np.array([[0.7, 0.3], [0.4, 0.6]]), np.array([0, 0]))
    assert np.isnan(found.auc)
    assert found.recall[0] == 0.5
    assert np.isnan(found.recall[1])
