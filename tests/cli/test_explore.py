"""``corn explore`` writes one page, and opens it where there is a screen."""

import json
from pathlib import Path

import pytest

from .commands import Runner


def test_the_page_shows_the_given_graph_first(corn: Runner, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    outcome = corn("explore", "--graph", "path:7", "--out", out, "--no-open", "--json")
    assert outcome.exit_code == 0
    assert json.loads(outcome.stdout)["page"] == str(out)
    page = out.read_text(encoding="utf-8")
    assert '{"source": "path:n=7", "agents": 7}' in page


def test_refusals_are_one_line(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (("--out", "page.txt"), "page.txt: the page's name must end in .html"),
        (("--graph", "path:2", "--no-open"), "the explorer is for 3 to 1000 agents, found 2"),
    ):
        outcome = corn("explore", *arguments)
        assert outcome.exit_code == 1
        assert message in outcome.stderr
        assert list(tmp_path.iterdir()) == []


def test_the_page_is_opened_only_where_there_is_a_screen(
    corn: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def note(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", note)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    out = tmp_path / "page.html"
    assert "open it in a browser" in corn("explore", "--out", out).stderr
    monkeypatch.setenv("DISPLAY", ":0")
    assert corn("explore", "--out", out).stderr == f"note: wrote {out}\n"
    assert opened == [out.as_uri()]
