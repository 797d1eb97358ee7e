"""Files are written completely or not at all."""

import sys
from pathlib import Path

import pytest

from corn.errors import FileFormatError
from corn.files import load_function, writing_whole


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_when_it_is_complete(durable: bool, tmp_path: Path) -> None:
    target = tmp_path / "table.csv"
    target.write_text("old")
    with writing_whole(target, durable=durable) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def write_half(path: Path) -> None:
        with writing_whole(path) as partial:
            partial.write_text("half of the n")
            raise KeyboardInterrupt

    target = tmp_path / "table.csv"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_half(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_syntax_error_is_reported_of_the_file_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("\n\nx = (\n")
    (tmp_path / "mine.py").write_text("import helper_of_mine\n")
    with pytest.raises(FileFormatError, match=r"helper_of_mine\.py: line 3: '\(' was never closed"):
        load_function(f"{tmp_path}/mine.py:make")


def test_a_file_may_change_the_path_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text("import sys\nsys.path.pop(0)\nmake = dict\n")
    assert load_function(f"{tmp_path}/mine.py:make") is dict
