"""The explorer computes in the browser what the package computes, and its exports work."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import corn
from corn.covariance import EAVESDROPPER, Design, Horizon, MechanismName, ThreatModel, design
from corn.covariance.decomposition import hidden_precision
from corn.distributed.planning import read_request
from corn.errors import InvalidArgumentError
from corn.privacy import PrivacyBudget, account_precision, gaussian, subsampling
from corn.report.explorer import CORE, read_scripts, write_page
from corn.topology import Network, load_network
from tests.report.browser import Browser, browsing, has_browser, needs_browser

Engine: TypeAlias = Callable[[str], Any]
NODE = shutil.which("node")
OBJECTIVE = Horizon(200.0, 0.1, 0.9)


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
    page.write_text(write_page(load_network("ring:8", mixing="gossip")), encoding="utf-8")
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
        assert power == pytest.approx(1 - gaussian.tradeoff(exact, 0.01), rel=1e-9)


SAMPLED = [(0.1, 300, 2000, 100), (8.0, 2000, 1000, 50)]


@pytest.mark.slow
def test_poisson_sampling_is_that_of_the_package(engine: Engine) -> None:
    for epsilon, steps, samples, batch in SAMPLED:
        budget = PrivacyBudget(
            epsilon=epsilon,
            delta=1e-5,
            num_steps=steps,
            clip=1,
            unit="sample",
            batch_size=batch,
            samples_per_agent=samples,
        )
        promise = {
            "unit": "sample",
            "sampling": "poisson",
            "epsilon": epsilon,
            "delta": 1e-5,
            "steps": steps,
            "clip": 1,
            "batch": batch,
            "samples": samples,
        }
        exact = budget.precision_cap
        cap, fourfold, power = engine(
            f"const p = {json.dumps(promise)}; return [corn.promises.precisionCap(p), "
            f"corn.promises.epsilonOf({4 * exact}, p), corn.promises.powerOf({exact}, p, 0.01)]"
        )
        assert cap == pytest.approx(exact, rel=1e-3)
        loss = account_precision([4 * exact], budget.query, num_steps=steps)
        assert fourfold == pytest.approx(loss.worst_epsilon(1e-5), rel=1e-3)
        assert power == pytest.approx(best_attack(exact, budget), rel=2e-3)


def best_attack(precision: float, budget: PrivacyBudget) -> float:
    """Return the power of the best attack at 1 % false alarms: min over ε of e^ε α + δ(ε)."""

    def power(epsilon: float) -> float:
        delta = subsampling.bound_delta(
            [precision], epsilon, num_steps=[budget.num_steps], query=budget.query
        )
        return math.exp(epsilon) * 0.01 + delta

    # δ is a convex function of e^ε, so that there is one minimum.
    most = 3 * float(np.max(budget.epsilon)) + 4
    return float(minimize_scalar(power, bounds=(0, most), method="bounded").fun)


@pytest.mark.parametrize(("sampling", "steps"), [("passes", 48), ("every-step", 1000)])
def test_batches_of_fixed_size_are_counted_as_in_the_package(
    engine: Engine, sampling: Any, steps: int
) -> None:
    budget = PrivacyBudget(
        epsilon=1,
        delta=1e-5,
        num_steps=1000,
        clip=1,
        unit="sample",
        batch_size=128,
        sampling=sampling,
        samples_per_agent=2800 if sampling == "passes" else None,
    )
    promise = '{unit: "sample", epsilon: 1, delta: 1e-5, steps: 1000, clip: 1, batch: 128, '
    promise += f'samples: 2800, sampling: "{sampling}"}}'
    cap, found = engine(
        f"const p = {promise};"
        "return [corn.promises.precisionCap(p), corn.promises.participations(p)]"
    )
    assert found == steps
    assert cap == pytest.approx(budget.precision_cap, rel=1e-9)


GRAPHS = ["ring:8", "path:2", "star:8", "complete:6", "er:n=12,p=0.4,seed=1", "karate"]


def prepare(network: Network) -> str:
    """Return lines that make ``n``, ``links`` and ``A`` of a network."""
    links = [[int(i), int(j)] for i, j in network.graph.edges]
    return (
        f"const n = {network.num_agents}, links = {json.dumps(links)};"
        "const W = corn.networks.metropolis(n, links);"
        "const A = corn.networks.objectiveMatrix(W, n, {length: 200, weight: 0.1, momentum: 0.9});"
        "const judge = (split) => [corn.matrices.dot(A, corn.designs.hiddenFrom(split)),"
        "corn.designs.centralRatio(split), corn.designs.hiddenPrecision(split, [0])];"
    )


def expect(found: Any, exact: Design, *, rel: float) -> None:
    """Compare value, ratio to a trusted server, and every agent's precision against agent 0."""
    value, ratio, precisions = found
    assert value == pytest.approx(exact.value, rel=rel)
    assert ratio == pytest.approx(exact.central_ratio, rel=rel)
    _, hidden = hidden_precision(exact.decomposition, [0])
    assert precisions[1:] == pytest.approx(hidden.tolist(), rel=rel)


@pytest.mark.parametrize("spec", GRAPHS)
def test_designs_against_an_eavesdropper_are_those_of_the_package(
    engine: Engine, spec: str
) -> None:
    network = load_network(spec, mixing="gossip")
    found = engine(
        prepare(network) + "const L = corn.networks.laplacian(n, links);"
        "return {A: Array.from(A), corn: judge(corn.designs.corn(A, n)),"
        "decor: judge(corn.designs.decor(A, L, n, links)), ldp: judge(corn.designs.ldp(n))}"
    )
    A = OBJECTIVE.matrix(network.step_matrix)
    assert np.reshape(found["A"], A.shape) == pytest.approx(A, rel=1e-9, abs=1e-9 * A.max())
    mechanisms: tuple[MechanismName, ...] = ("corn", "decor", "ldp")
    for name in mechanisms:
        exact = design(network, 1.0, mechanism=name, objective=OBJECTIVE, threat=EAVESDROPPER)
        expect(found[name], exact, rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "colluders"),
    [
        ("er:n=12,p=0.4,seed=1", 1),
        ("star:8", 1),
        ("complete:6", 1),
        ("ring:6", 2),
        pytest.param("er:n=24,p=0.2,seed=1", 1, marks=pytest.mark.slow),
    ],
)
def test_designs_against_insiders_are_those_of_the_package(
    engine: Engine, spec: str, colluders: int
) -> None:
    network = load_network(spec, mixing="gossip")
    found, gap, worst = engine(
        prepare(network) + "const objective = {length: 200, weight: 0.1, momentum: 0.9};"
        f"const settings = {{agents: n, links, objective, colluders: {colluders}}};"
        "const found = corn.tasks.insiders(settings, () => {});"
        f"const all = [...corn.insiders.combinations(n, {colluders})].map((coalition) => "
        "Math.max(...corn.designs.hiddenPrecision(found.split, coalition)));"
        "return [judge(found.split), found.gap, Math.max(...all)]"
    )
    exact = design(network, 1.0, objective=OBJECTIVE, threat=ThreatModel(colluders))
    expect(found, exact, rel=1e-2)
    assert worst == pytest.approx(1, rel=1e-9)
    # The page shows its gap, which for many agents is a few per cent.
    if exact.status == "optimal":
        assert gap < (1e-2 if network.num_agents < 24 else 3e-2)


SETTINGS = {
    "source": "ring:4",
    "agents": 4,
    "links": [[0, 1], [1, 2], [2, 3], [0, 3]],
    "promise": {
        "unit": "sample",
        "epsilon": 2,
        "delta": 1e-6,
        "steps": 50,
        "clip": 0.5,
        "sampling": "poisson",
        "batch": 10,
        "samples": 200,
    },
    "objective": {"length": 10, "weight": 0.1, "momentum": 0},
    "colluders": 1,
    "mechanism": "corn",
    "insiders": [1],
}


def export(engine: Engine, form: str, **changes: Any) -> str:
    settings = json.dumps({**SETTINGS, **changes})
    return str(engine(f"return corn.exports.{form}({settings})"))


@pytest.mark.parametrize("mechanism", ["corn", "decor", "ldp"])
def test_exported_python_prints_what_the_page_shows(
    engine: Engine, mechanism: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = export(engine, "pythonLines", mechanism=mechanism)
    exec(compile(code, "export", "exec"), {})
    ratio, epsilons = capsys.readouterr().out.splitlines()
    assert float(ratio) >= 1
    assert list(eval(epsilons)) == [0, 2, 3]


def test_exported_commands_run(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from corn.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawn.edges").write_text(export(engine, "edgeList"))
    text = export(engine, "commandLine", source=None).replace("\\\n", " ")
    plan, verify, compare = (line.split()[1:] for line in text.splitlines())
    for arguments in (plan, verify, compare):
        with pytest.raises(SystemExit, match="0"):
            app(arguments)
    made = corn.load_plan(tmp_path / "plan.corn")
    assert made.budget.epsilon == 2
    assert made.objective == Horizon(10, 0.1)


def test_drawn_links_keep_the_numbers_of_agents(engine: Engine, tmp_path: Path) -> None:
    """Agents are numbered on the page, and an edge list must not number them anew."""
    links = [[2, 11], [0, 2], [1, 11], [0, 3], *([k, k + 1] for k in range(3, 11))]
    path = tmp_path / "drawn.edges"
    path.write_text(export(engine, "edgeList", links=links))
    assert nx.utils.edges_equal(
        list(load_network(path, mixing="gossip").graph.edges), map(tuple, links)
    )


def test_exported_requests_are_read(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(export(engine, "planRequest"))
    request = read_request(path)
    assert request.budget.sampling_rate is None
    assert request.budget.query.sampling_rate == 0.05
    assert (request.objective, request.threat) == (Horizon(10, 0.1), ThreatModel(1))
    promise = {**SETTINGS["promise"], "unit": "agent"}  # type: ignore[dict-item]
    path.write_text(export(engine, "planRequest", promise=promise, mechanism="decor"))
    assert read_request(path).threat == EAVESDROPPER


VERDICT = "document.getElementById('verdict').textContent"
READY = "corn.page.state.view.power !== null"
TAB, ENTER = "\ue004", "\ue007"


@needs_browser
def test_an_insider_is_marked_by_keyboard(browser: Browser) -> None:
    browser.wait(READY)
    assert "The promise holds" in browser.run(
        "return document.getElementById('verdict').textContent"
    )
    browser.run(
        "document.getElementById('colluders').value = '0';"
        "document.getElementById('settings').dispatchEvent(new Event('input'));"
        "document.getElementById('clear').focus()"
    )
    # From the button, the next stops are the agents, in order.
    browser.press(TAB + TAB + ENTER)
    text = browser.wait(f"{VERDICT}.includes('broken') && {VERDICT}")
    assert "insider 1," in text
    assert browser.run("return document.activeElement.dataset.agent") == "1"
    assert browser.run("return document.activeElement.getAttribute('aria-pressed')") == "true"
    network = load_network("ring:8", mixing="gossip")
    budget = PrivacyBudget(epsilon=1, delta=1e-5, num_steps=1000, clip=0.1)
    noise = design(network, budget, threat=EAVESDROPPER)
    exposed = corn.expose(noise.decomposition, [1], budget.query, num_steps=1000).epsilon(1e-5)
    shown = browser.run("return corn.page.state.view.epsilons")
    assert shown[1] is None
    assert shown[0] == pytest.approx(exposed[0], rel=1e-3)
    browser.click("#clear")
    assert browser.errors() == []


@needs_browser
def test_a_graph_is_drawn_and_sampling_chosen(browser: Browser) -> None:
    browser.click("#add")
    browser.run(
        "document.getElementById('unit').value = 'sample';"
        "document.getElementById('settings').dispatchEvent(new Event('input'))"
    )
    browser.wait("corn.page.state.places.length === 9")
    browser.wait(f"corn.page.state.view.settings.promise.unit === 'sample' && {READY}")
    browser.click("input[value=pythonLines]")
    text = browser.run("return document.getElementById('export').textContent")
    assert 'load_network("drawn.edges", mixing="gossip")' in text
    assert browser.errors() == []


@needs_browser
def test_the_page_fits_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(write_page(), encoding="utf-8")
    with browsing((360, 740)) as phone:
        phone.open(page)
        phone.wait("document.querySelectorAll('.agent').length === 20")
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


def test_networks_that_a_browser_cannot_design_for_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="for 2 to 40 agents, found 41"):
        write_page(load_network("ring:41", mixing="gossip"))
    with pytest.raises(InvalidArgumentError, match="Metropolis weights, found lazy"):
        write_page(load_network("ring:8", weights="lazy"))
