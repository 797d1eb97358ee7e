"""The explorer computes in the browser what the package computes, and its exports work."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
import pytest
from scipy.stats import norm

import corn
from corn.covariance import EAVESDROPPER, ThreatModel, default_objective, design
from corn.privacy import PrivacyBudget, gaussian
from corn.report.explorer import CORE, read_scripts, write_page
from corn.topology import Network, load_network
from tests.report.browser import Browser, browsing, has_browser, needs_browser

Engine: TypeAlias = Callable[[str], Any]
NODE = shutil.which("node")


def run_in_node(code: str) -> Any:
    """Return what the page's scripts compute, outside of any browser."""
    script = f"globalThis.corn = {{}};\n{read_scripts(CORE)}\n"
    script += f"console.log(JSON.stringify((() => {{ {code} }})()));"
    assert NODE is not None
    process = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    page = tmp_path_factory.mktemp("explorer") / "page.html"
    page.write_text(write_page(load_network("ring:8", mixing="sum")), encoding="utf-8")
    with browsing() as opened:
        opened.open(page)
        yield opened


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return Node.js, which starts sooner, or else a browser: both compute with V8."""
    if NODE is not None:
        return run_in_node
    if not has_browser():
        pytest.skip("neither Node.js nor a browser: the page's scripts cannot run")
    found: Browser = request.getfixturevalue("browser")
    # As text, because infinities and arrays of floats would not survive WebDriver as they are.
    return lambda code: json.loads(found.run(f"return JSON.stringify((() => {{ {code} }})())"))


def test_gaussian_privacy_is_that_of_the_package(engine: Engine) -> None:
    points = [(e, d) for e in (0.05, 0.5, 1, 10, 40) for d in (1e-10, 1e-5, 1e-2)]
    found = engine(
        f"return {json.dumps(points)}.map(([e, d]) => {{ const mu = corn.gaussian.muFrom(e, d);"
        "return [mu, corn.gaussian.epsilonFrom(2 * mu, d), corn.gaussian.power(mu, 0.01)]; })"
    )
    for (epsilon, delta), (mu, doubled, power) in zip(points, found, strict=True):
        exact = gaussian.mu_from(epsilon, delta)
        assert mu == pytest.approx(exact, rel=1e-9)
        assert doubled == pytest.approx(gaussian.epsilon_from(2 * exact, delta), rel=1e-9)
        assert power == pytest.approx(norm.sf(norm.isf(0.01) - exact), rel=1e-9)


@pytest.mark.parametrize(("agents", "colluders", "insiders"), [(3, 1, 1), (8, 2, 5), (30, 3, 10)])
def test_exact_sums_are_those_of_the_package(
    engine: Engine, agents: int, colluders: int, insiders: int
) -> None:
    network = load_network(f"ring:{agents}", mixing="sum")
    budget = PrivacyBudget(epsilon=1, delta=1e-5, num_steps=1000, clip=0.1)
    # The page assumes seeds that join any agents, as its text says.
    noise = design(network, budget, threat=ThreatModel(colluders, "pairs"))
    settings = {
        "promise": {"epsilon": 1, "delta": 1e-5, "steps": 1000, "clip": 0.1},
        "agents": agents,
        "colluders": colluders,
        "insiders": insiders,
        "falseAlarms": 0.01,
    }
    ratio, found = engine(
        f"return [corn.sums.centralRatio({agents}, {colluders}), "
        f"corn.sums.account({json.dumps(settings)})]"
    )
    assert ratio == pytest.approx(noise.central_ratio, rel=1e-9)
    assert found["cap"] == pytest.approx(budget.precision_cap, rel=1e-9)
    for row in found["rows"]:
        exposed = corn.expose(
            noise.decomposition, range(row["size"]), budget.query, num_steps=1000
        ).epsilon(1e-5)
        assert row["epsilon"] == pytest.approx(max(exposed.values()), rel=1e-6)
    sizes = [row["size"] for row in found["rows"]]
    assert {0, 1, colluders, insiders} <= set(sizes)
    assert found["epsilon"] == found["rows"][sizes.index(insiders)]["epsilon"]


def test_independent_noise_costs_as_many_times_as_there_are_agents() -> None:
    """The page shows this cost of LDP without computing a design."""
    budget = PrivacyBudget(epsilon=1, delta=1e-5, num_steps=10, clip=1)
    network = load_network("ring:9", mixing="sum")
    assert design(network, budget, mechanism="ldp").central_ratio == pytest.approx(9)


@pytest.mark.parametrize("graph", ["ring:3", "ring:8", "ring:21", "complete:6"])
@pytest.mark.parametrize("steps", [1, 12, 1000])
def test_gossip_is_that_of_the_package(engine: Engine, graph: str, steps: int) -> None:
    kind, size = graph.split(":")
    budget = PrivacyBudget(epsilon=1, delta=1e-5, num_steps=steps, clip=0.1)
    network = load_network(graph, mixing="gossip")
    noise = design(network, budget, threat=EAVESDROPPER, objective=default_objective(steps))
    found = engine(f"return corn.gossip.centralRatio('{kind}', {size}, {steps})")
    # The solver keeps noise finite that mixes away at once, as on complete graphs.
    assert found == pytest.approx(noise.central_ratio, rel=1e-3)


VERDICT = "document.getElementById('verdict').textContent"


def fill(browser: Browser, field: str, value: object) -> None:
    """Write a value into a field as a user does."""
    browser.run(
        f"const field = document.getElementById('{field}'); field.value = '{value}';"
        "field.dispatchEvent(new Event('input', { bubbles: true }))"
    )


@needs_browser
def test_more_insiders_than_the_design_is_against_break_the_promise(browser: Browser) -> None:
    assert "The promise holds" in browser.wait(VERDICT)
    fill(browser, "insiders", 3)
    text = browser.wait(f"{VERDICT}.includes('broken') && {VERDICT}")
    assert "with 3 insiders" in text
    fill(browser, "colluders", 3)
    browser.wait(f"{VERDICT}.includes('The promise holds')")
    fill(browser, "insiders", 8)
    browser.wait(f"{VERDICT}.includes('At least one agent must not be an insider')")
    fill(browser, "insiders", 1)
    assert browser.errors() == []


@needs_browser
def test_the_command_makes_the_plan(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from corn.cli import app

    monkeypatch.chdir(tmp_path)
    fill(browser, "epsilon", 2)
    text = browser.run("return document.getElementById('export').textContent")
    with pytest.raises(SystemExit, match="0"):
        app(text.replace("\\\n", " ").split()[1:])
    made = corn.load_plan(tmp_path / "plan.corn")
    assert (made.budget.epsilon, made.network.source) == (2, "ring:n=8")
    assert browser.errors() == []


@needs_browser
def test_a_thousand_agents_fit_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(write_page(load_network("ring:1000", mixing="sum")), encoding="utf-8")
    with browsing((360, 740)) as phone:
        phone.open(page)
        phone.wait("document.querySelectorAll('#picture circle').length === 999")
        assert phone.run("return document.documentElement.scrollWidth") <= 360


def test_the_page_needs_nothing_else() -> None:
    page = write_page()
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page) == []
    assert "default-src 'none'" in page
    # The address of the SVG vocabulary is a name, not a place that is visited.
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}


def test_names_of_files_cannot_end_a_script() -> None:
    graph = nx.cycle_graph(3)
    network = Network(graph, np.full((3, 3), 1 / 3), "</script><b>", "metropolis")
    assert "</script><b>" not in write_page(network)
