"""The privacy report: what it says for each kind of promise, and how it looks on a phone."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from corn.learn import ModelPromise
from corn.privacy import Unit, gaussian
from corn.privacy.budget import Relation
from corn.report.privacy_page import Published, describe_privacy, write_html, write_pdf
from tests.report.browser import browsing, needs_browser

PROMISE = ModelPromise(
    epsilon=1.0,
    epsilon_least=1.0,
    delta=1e-5,
    unit="sample",
    protects="one sample of one agent",
    clipping="each sample's gradient is clipped to 1",
    relation="replace-one",
    adversary="an eavesdropper",
    num_steps=100,
    num_agents=4,
    mechanism="corn",
    plan="ab" * 32,
)


def make_page(promise: ModelPromise) -> str:
    files = (Published("model<1>.pt", 1234, "cd" * 32),)
    found = describe_privacy(promise, model="a <b> model", model_digest="ef" * 32, published=files)
    return write_html(found)


def test_a_row_is_protected_as_the_numbers_say() -> None:
    page = make_page(PROMISE)
    # e/(e + 1), and at two rows e²/(e² + 1), rounded up.
    assert "at most 73.2\xa0%" in page
    assert "88.1\xa0% in place of 73.2\xa0%" in page
    assert "δ\xa0=\xa010⁻⁵ for each row of each site" in page
    assert PROMISE.plan in page
    assert "a &lt;b&gt; model" in page
    assert "model&lt;1&gt;.pt" in page


def test_a_checked_column_of_people_is_named() -> None:
    found = describe_privacy(PROMISE, model="m", model_digest="ef" * 32, id_column="patient")
    assert "no person has two rows, by the column &#39;patient&#39;" in write_html(found)
    assert "was not told which rows belong to one person" in make_page(PROMISE)


@pytest.mark.parametrize("unit", ["sample", "agent"])
@pytest.mark.parametrize("relation", ["replace-one", "add-or-remove-one", "zero-out"])
def test_a_change_of_values_costs_twice_the_epsilon_unless_it_is_what_epsilon_counts(
    relation: Relation, unit: Unit
) -> None:
    """At ε = δ = 0.1, values of a gradient that may also be zero are guessed more often."""
    delta, replaced = 0.1, relation == "replace-one"
    mu = gaussian.mu_from(0.1, delta) * (1 if replaced else 2)
    # The best guess between N(0, 1) and N(μ, 1) is right with probability Φ(μ/2).
    attained = 100 * statistics.NormalDist().cdf(mu / 2)
    page = make_page(
        replace(PROMISE, epsilon=0.1, epsilon_least=0.1, delta=delta, unit=unit, relation=relation)
    )
    assert f"({relation} adjacency)" in page
    (question,) = (line for line in page.splitlines() if "An attacker wants to know" in line)
    assert ("or other data in its place" in question) == replaced
    stated = [float(found) for found in re.findall(r"([\d.]+)\xa0%", question)]
    assert max(stated) >= attained


@pytest.mark.parametrize(
    "change", [{"simulation": "the data are public"}, {"epsilon": None, "epsilon_least": None}]
)
def test_a_model_without_a_promise_protects_nobody(change: dict[str, None]) -> None:
    page = make_page(replace(PROMISE, **change))  # type: ignore[arg-type]
    assert "protects nobody" in page
    assert "holds" not in page.split('class="verdict')[1][:10]


def test_promises_that_differ_are_shown_as_a_range() -> None:
    page = make_page(replace(PROMISE, epsilon_least=0.5))
    assert "ε\xa0=\xa00.5 to 1 " in page


def test_pdf_has_the_same_content() -> None:
    pytest.importorskip("fpdf", reason="PDF is an extra")
    found = describe_privacy(PROMISE, model="model", model_digest="ef" * 32)
    assert write_pdf(found).startswith(b"%PDF-")


@needs_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_the_screen(tmp_path: Path, width: int) -> None:
    path = tmp_path / "page.html"
    path.write_text(make_page(PROMISE), encoding="utf-8")
    with browsing((width, 800)) as browser:
        browser.open(path)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert not browser.errors()
