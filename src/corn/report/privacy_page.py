"""One page on the privacy of a model, for a data-protection officer, as HTML or PDF."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from corn.errors import MissingExtraError, list_some
from corn.learn import ModelPromise
from corn.noise import load_roster
from corn.noise.ledger import ReleaseHistory
from corn.privacy.budget import Relation
from corn.privacy.composition import TotalLoss
from corn.privacy.rounding import round_up, round_up_range, write_exactly
from corn.topology.graphs import label_agent
from corn.version import __version__

_FALSE_ALARMS = 0.01
_NEARLY_CERTAIN = 0.99
_ALTERNATIVES: dict[Relation, str] = {
    "replace-one": "or other data in its place",
    "add-or-remove-one": "or not",
    "zero-out": "or a gradient of zero in its place",
}
_MOST_ROWS = 6  # more would need a second page
_POWER = re.compile(r"\b(\d+(?:\.\d+)?)e-0*(\d+)")
_EXPONENTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# What (ε, δ) means for an attacker who wants to know whether a record was used. Both bounds are
# exact: for every (ε, δ) there is a mechanism with which an attacker reaches them, and none with
# which it does better, whatever it knows besides (Kairouz, Oh and Viswanath 2015, theorem 2.1).


def bound_guess(epsilon: float, delta: float) -> float:
    """Return the largest probability of a right guess between two neighbouring data sets.

    Both are equally likely before, as for a coin that decides whether a record is used. At errors
    (α, β) with e^ε α + β ≥ 1 − δ and α + e^ε β ≥ 1 − δ, the guess is right with probability
    1 − (α + β)/2, at most (e^ε + δ)/(e^ε + 1).

    >>> round(bound_guess(1, 0), 4), bound_guess(0, 0)
    (0.7311, 0.5)
    """
    # By e^−ε, which cannot overflow.
    inverse = math.exp(-epsilon)
    return (1 + delta * inverse) / (1 + inverse)


def bound_detection(epsilon: float, delta: float, false_alarms: float) -> float:
    """Return the largest fraction of used records that an attack finds.

    ``false_alarms`` is the fraction of unused records that the attack takes for used ones.

    >>> round(bound_detection(1, 0, 0.01), 4)
    0.0272
    """
    # Beyond e^700 the first bound is above one in any case.
    steep = math.exp(min(epsilon, 700.0)) * false_alarms + delta
    flat = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(steep, flat, 1.0)


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, list items, a table and commands, of which any may be empty."""

    heading: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrivacyPage:
    """The content of the page; ``verdict`` is the promise, or its absence, in one sentence."""

    title: str
    verdict: str
    holds: bool
    sections: tuple[Section, ...]
    footer: str


@dataclass(frozen=True)
class Published:
    """A published file with its size in bytes and its SHA-256."""

    name: str
    size: int
    digest: str


def describe_privacy(
    promise: ModelPromise,
    *,
    model: str,
    model_digest: str,
    published: Sequence[Published] = (),
    totals: Sequence[tuple[ReleaseHistory, TotalLoss]] = (),
    keys: Path | None = None,
    id_column: str | None = None,
) -> PrivacyPage:
    """Collect the content of the page.

    ``model_digest`` is the SHA-256 of the model's file. ``totals`` has all releases of each agent
    whose ledger is in the folder ``keys``, and their total. By ``id_column`` each site checked that
    every person has one row.
    """
    sections = [
        *_explain_promise(promise, id_column),
        _describe_total(totals, keys),
        _describe_published(published, promise),
        _describe_checks(promise, model_digest, keys),
    ]
    return PrivacyPage(
        title=model,
        verdict=_set_numbers(_judge(promise)),
        holds=promise.holds,
        sections=tuple(
            replace(
                own,
                paragraphs=tuple(map(_set_numbers, own.paragraphs)),
                columns=tuple(map(_set_numbers, own.columns)),
            )
            for own in sections
        ),
        footer=f"CorN {__version__}, {datetime.now(UTC):%d %B %Y}",
    )


def _set_numbers(text: str) -> str:
    r"""Return text with powers of ten, and no line break before a unit or after an equals sign.

    >>> _set_numbers("δ = 1e-05"), _set_numbers("2.5e-06")
    ('δ\xa0=\xa010⁻⁵', '2.5\xa0·\xa010⁻⁶')
    """

    def set_power(match: re.Match[str]) -> str:
        factor = "" if match[1] == "1" else f"{match[1]} · "
        return f"{factor}10{('-' + match[2]).translate(_EXPONENTS)}"

    powers = _POWER.sub(set_power, text)
    return powers.replace(" = ", "\xa0=\xa0").replace(" · ", "\xa0·\xa0").replace(" %", "\xa0%")


def _judge(promise: ModelPromise) -> str:
    if promise.epsilon is None:
        return "This model was trained without noise. It protects nobody."
    if promise.simulation:
        return f"This is a simulation and protects nobody: {promise.simulation}."
    unit = "each row of each site" if promise.unit == "sample" else "all data of each site"
    return (
        f"Differential privacy with ε = {round_up_range([promise.epsilon_least, promise.epsilon])} "
        f"and δ = {write_exactly(promise.delta or 0.0)} for {unit} ({promise.relation} adjacency)."
    )


def _percent(fraction: float) -> str:
    """Return a percentage, rounded up to one digit after the point.

    >>> _percent(0.73106), _percent(1.0)
    ('73.2 %', '100.0 %')
    """
    # A tenth of a billionth less, so that 0.5 is not rounded up to 50.1 %.
    return f"{math.ceil(fraction * 1000 - 1e-9) / 10:.1f} %"


def _explain_promise(promise: ModelPromise, id_column: str | None) -> list[Section]:
    if promise.epsilon is None or promise.relation is None:
        return []
    epsilon, delta = promise.epsilon, promise.delta or 0.0
    best = bound_guess(epsilon, delta)
    guess = _percent(best)
    weak = " So large an ε hardly limits an attacker: choose a smaller one."
    # Two steps from neighbour to neighbour: 2ε, and (1 + e^ε) δ.
    doubled = min(1.0, (1 + math.exp(min(epsilon, 700.0))) * delta)
    changed = f"{_percent(bound_guess(2 * epsilon, doubled))} in place of {guess}"
    found = _percent(bound_detection(epsilon, delta, _FALSE_ALARMS))
    is_replaced = promise.relation == "replace-one"
    if promise.unit == "sample":
        what = "a certain row"
        checked = "CorN was not told which rows belong to one person."
        if id_column is not None:
            checked = (
                "Each site's program checked that no person has two rows, by the column "
                f"{id_column!r}."
            )
        who = (
            "Each row of each site's table. If every person has one row, each person is protected "
            f"as stated. A person with two rows is protected less: {changed}. {checked}"
        )
    else:
        what = "the data of a certain site"
        who = (
            "All data of each site together, and with it each person in the data, whatever the "
            "number of their rows at that site"
            + ("." if is_replaced else f". Changed values are protected less: {changed}.")
        )
    meaning = (
        f"{'' if promise.holds else 'In a real run, the following would hold. '}An attacker wants "
        f"to know whether {what} was used for training, {_ALTERNATIVES[promise.relation]}. Without "
        "the model both are equally likely (50 %). After the attacker has seen everything that was "
        f"published, its best guess is right in at most {guess} of all cases."
        + (weak if best >= _NEARLY_CERTAIN else "")
        + ("" if is_replaced else f" Between two values of it, a guess is better: {changed}."),
        f"An attack that wrongly names 1 of 100 that were not used finds at most {found} of those "
        "that were used. Without the model it finds 1.0 %.",
        f"Both numbers follow exactly from ε = {round_up(epsilon)} and δ = {write_exactly(delta)}. "
        "They hold for every attacker of the kind below, whatever else it knows, also in the "
        "future. Conclusions about the population, which hold without the data of any one person "
        "too, are not prevented.",
    )
    against = (
        f"{promise.adversary[:1].upper()}{promise.adversary[1:]}. Such an attacker sees the model "
        "and every message between the sites. An insider is a site that takes part. The plan, the "
        "program and all settings are public."
    )
    return [
        Section("What ε and δ mean", meaning),
        Section("Who is protected", (who, f"How: {promise.clipping}.")),
        Section("Against whom", (against,)),
        Section("What is assumed", items=_ASSUMED),
    ]


_ASSUMED = (
    "Each site runs the program unchanged, and keeps its keys and its release ledger secret. "
    "Whoever has keys and messages can remove the noise.",
    "No more sites collude than stated above.",
    "Bounds, categories and classes of the columns are public, and were not computed from private "
    "data.",
    "Scores on private data, logs and times of computation are not published: ε does not cover "
    "them.",
    "A person whose data several sites have is protected at each of them by itself. The losses add "
    "up.",
)


def _describe_total(
    totals: Sequence[tuple[ReleaseHistory, TotalLoss]], keys: Path | None
) -> Section:
    heading = "Total of all plans so far"
    if not totals:
        return Section(
            heading,
            (
                "Not included. Each site adds up its own releases by its ledgers: corn report OUT "
                "--keys FOLDER. Another training run on the same data adds to the loss.",
            ),
        )
    worst = max((total for _, total in totals), key=lambda total: total.epsilon)
    # Sites with the same numbers share a row, so that the page stays one page.
    sites: dict[tuple[str, ...], list[str]] = {}
    roster = None if keys is None else keys / "roster.json"
    names = [] if roster is None or not roster.exists() else load_roster(roster).names
    for history, total in sorted(totals, key=lambda own: (-own[1].epsilon, own[0].agent)):
        # Without a ledger, more was released than those that are left show.
        bound = "at least " if history.problems else ""
        epsilon = "none" if math.isinf(total.epsilon) else round_up(total.epsilon)
        releases = sum(expense.num_releases for expense in history.expenses)
        numbers = (str(len(history.records)), str(releases), f"{bound}{epsilon}")
        sites.setdefault(numbers, []).append(label_agent(names, history.agent))
    rows = [(list_some(agents), *numbers) for numbers, agents in sites.items()]
    more = sum(len(agents) for agents in list(sites.values())[_MOST_ROWS:])
    lost = [problem for history, _ in totals for problem in history.problems]
    about = "at least " if lost else ""
    notes = [f"The largest total is {about}{worst.describe()}."]
    # With a lost ledger the total is a lower bound, which bounds no guess.
    if math.isfinite(worst.epsilon) and not lost:
        guess = _percent(bound_guess(worst.epsilon, worst.delta))
        notes.append(
            "An attacker who has seen what all these plans published guesses right in at most "
            f"{guess} of all cases."
        )
    notes += [f"The {more} sites that are not listed have no larger total."] if more else []
    if lost:
        notes.append(f"A ledger is lost or damaged, so that the total is unknown: {lost[0]}.")
    notes.append("Releases under keys in other folders are not counted.")
    return Section(
        heading,
        tuple(notes),
        columns=("site", "plans", "releases", f"total ε at δ = {write_exactly(worst.delta)}"),
        rows=tuple(rows[:_MOST_ROWS]),
    )


def _describe_published(published: Sequence[Published], promise: ModelPromise) -> Section:
    return Section(
        "What was published",
        (
            f"In each of {promise.num_steps:,} steps, each of {promise.num_agents} sites "
            f"sent{'' if promise.holds else ', in a simulation,'} a clipped gradient with noise. "
            "The models are computed from these releases. "
            + (
                "The following files are meant for publication."
                if published
                else "This run has no folder for publication."
            ),
        ),
        columns=("file", "bytes", "SHA-256") if published else (),
        rows=tuple((own.name, f"{own.size:,}", own.digest[:16]) for own in published),
    )


def _describe_checks(promise: ModelPromise, digest: str, keys: Path | None) -> Section:
    folder = "KEYS" if keys is None else str(keys)
    commands = [f"sha256sum model.pt    # {digest}"]
    told = "The first command shows that this report is about the model at hand."
    if promise.plan:
        commands += [
            f"corn verify plan.corn    # {promise.plan}",
            "corn audit plan.corn",
            f"corn keys ledger {folder}",
        ]
        told += (
            " The second recomputes ε of every site from the plan alone, and prints how its "
            "fingerprint begins. The third attacks the program and measures ε from below. The last "
            "adds up all releases of a site."
        )
    return Section("How to verify", (told,), commands=tuple(commands))


def _template() -> jinja2.Template:
    source = resources.files("corn.report").joinpath("privacy_page.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source)


def write_html(page: PrivacyPage) -> str:
    """Return the page as one HTML file without scripts or other files."""
    return _template().render(page=page)


_GREEN, _RED, _INK = "#2e7d4f", "#b3261e", "#1c2026"


def write_pdf(page: PrivacyPage) -> bytes:
    """Return the page as PDF; fpdf2 is an extra."""
    try:
        from fpdf import FPDF, TextStyle
    except ImportError as error:
        raise MissingExtraError("a report as PDF", extra="pdf") from error
    from matplotlib import get_data_path

    pdf: Any = FPDF(format="A4")
    # Matplotlib comes with a font that has Greek letters; those of PDF readers have none.
    fonts = Path(get_data_path()) / "fonts" / "ttf"
    for style, name in (("", "DejaVuSans.ttf"), ("B", "DejaVuSans-Bold.ttf")):
        pdf.add_font("sans", style, str(fonts / name))
    pdf.add_font("mono", "", str(fonts / "DejaVuSansMono.ttf"))
    pdf.set_title("Privacy report")
    pdf.set_creator(f"CorN {__version__}")
    pdf.set_margin(15)
    pdf.set_auto_page_break(True, margin=10)
    pdf.add_page()
    pdf.set_font("sans", "", 8)
    pdf.set_fill_color(255)
    template = _template()
    body = "".join(template.blocks["body"](template.new_context({"page": page})))
    # HTML in fpdf2 has no classes: the verdict, the only text in bold, gets its colour here.
    colour = _GREEN if page.holds else _RED
    body = body.replace("<b>", f'<font color="{colour}"><b>').replace("</b>", "</b></font>")
    pdf.write_html(
        body.replace("<p>", '<p line-height="1.2">'),
        font_family="sans",
        li_prefix_color=_INK,
        tag_styles={
            "h1": TextStyle("sans", "B", 17, color=_INK, t_margin=0, b_margin=1),
            "h2": TextStyle("sans", "B", 10, color=_INK, t_margin=2.0, b_margin=0.6),
            "p": TextStyle(t_margin=0, b_margin=0.4),
            "li": TextStyle(l_margin=3, t_margin=0),
            "pre": TextStyle("mono", "", 6.6, t_margin=0, b_margin=1),
        },
    )
    return bytes(pdf.output())
