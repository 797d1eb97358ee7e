"""``corn data`` lists and gets data sets."""

import json
from pathlib import Path

import pytest

from .commands import Runner

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORN_DATA", str(tmp_path))


def test_list_shows_absent_data_sets(corn: Runner) -> None:
    outcome = corn("data", "list")
    assert outcome.exit_code == 0
    assert "no: corn data get a9a" in outcome.stdout
    facts = json.loads(corn("data", "list", "--json").stdout)
    assert [(entry["name"], entry["present"]) for entry in facts["datasets"]] == [
        ("a9a", False),
        ("mnist", False),
        ("breast-cancer", True),
        ("digits", True),
        ("synthetic", True),
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no real data beside the repository")
def test_files_of_a_folder_are_copied_to_the_cache(corn: Runner, tmp_path: Path) -> None:
    outcome = corn("data", "get", "a9a", SHARED / "a9a")
    assert outcome.exit_code == 0
    assert f"a9a is in {tmp_path / 'a9a'};" in outcome.stderr
    facts = json.loads(corn("data", "list", "--json").stdout)
    assert facts["datasets"][0]["present"] is True


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["get", "cifar"], 1, "must be one of a9a, mnist"),
        (["get", "digits"], 1, "one of a9a, mnist"),
        (["get"], 1, "must be one of a9a, mnist"),
        (["get", "a9a", "/nowhere"], 1, "must be a directory with a file a9a"),
        (["remove"], 2, "remove"),
    ],
)
def test_bad_arguments_are_refused(
    corn: Runner, arguments: list[str], exit_code: int, message: str
) -> None:
    outcome = corn("data", *arguments)
    assert outcome.exit_code == exit_code
    assert message in " ".join(outcome.stderr.split())
