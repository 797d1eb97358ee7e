"""Files are written completely or not at all."""

from pathlib import Path

import pytest

from corn.files import writing_whole


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
