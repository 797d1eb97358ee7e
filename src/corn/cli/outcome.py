"""The last line of ``corn train`` and ``corn launch``: what was reached, at which privacy."""

from __future__ import annotations

from collections.abc import Mapping

from corn.cli.strictest import describe_server
from corn.covariance import ThreatModel
from corn.privacy import PrivacyBudget
from corn.privacy.rounding import round_up_range

# The score that says most, of those that a task has.
_SCORES = {
    "test_accuracy_of_average": "{:.1f} % test accuracy",
    "test_accuracy": "{:.1f} % test accuracy",
    "test_loss_of_average": "test loss {:.4g}",
    "test_loss": "test loss {:.4g}",
    "optimality_gap": "optimality gap {:.4g}",
    "train_loss": "training loss {:.4g}",
}


def describe_outcome(
    scores: Mapping[str, object],
    spent: object,
    budget: PrivacyBudget,
    *,
    threat: ThreatModel,
    central_ratio: float,
    weighted_ratio: float,
    is_simulated: bool = False,
) -> str | None:
    """Return score, ε, unit, adversary and the ratio to a trusted server, if there is a score.

    >>> budget = PrivacyBudget(1, 1e-5, num_steps=10, clip=1)
    >>> scores = {"test_accuracy": 0.9312}
    >>> ratios = {"central_ratio": 1.2, "weighted_ratio": 1.2}
    >>> describe_outcome(scores, 1.0, budget, threat=ThreatModel(1), **ratios)
    "93.1 % test accuracy at ε = 1 for one agent's whole data set, against an eavesdropper and one
    insider, with 1.2 × a trusted server's noise variance in the average model"
    """
    found = [(scores.get(name), words) for name, words in _SCORES.items()]
    said = [
        words.format(100 * value if "%" in words else value)
        for value, words in found
        # NaN, which is not equal to itself, stands for a score that was not measured.
        if isinstance(value, float) and value == value
    ]
    if not said:
        return None
    kind = "simulated ε" if is_simulated else "ε"
    insiders = f" and {threat.describe_colluders()}" if threat.max_colluders else ""
    return (
        f"{said[0]} at {kind} = {round_up_range(spent)} for {budget.queries[0].protects}, against "
        f"an eavesdropper{insiders}, with {describe_server(central_ratio, weighted_ratio, budget)}"
    )
