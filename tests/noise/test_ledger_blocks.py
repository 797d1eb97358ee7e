"""How many releases one write reserves, and so what a crash costs."""

from pathlib import Path

from .test_ledger import open_ledger


def test_a_crash_leaves_most_of_a_short_plan(tmp_path: Path) -> None:
    path, crashed = tmp_path / "ledger", tmp_path / "crashed"
    for limit, left in ((60, 59), (1000, 980)):
        with open_ledger(path, limit) as ledger:
            assert ledger.reserved_before == 0
            ledger.reserve(0)
            crashed.write_bytes(path.read_bytes())
        with open_ledger(crashed, limit) as restarted:
            assert (restarted.remaining, restarted.reserved_before) == (left, limit - left)
        path.unlink()
