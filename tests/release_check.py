"""Install a wheel or an sdist into a clean environment and use it there: ``make release``.

Not a test of the suite, because installing all dependencies takes minutes.
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECKS = (
    "account --epsilon 1 --unit sample --batch-size 32 --samples-per-agent 500 --json",
    "compare --graph ring:6 --epsilon 5 --json",
    "plan --graph ring:4 --epsilon 5 --steps 20 --out plan.corn --json",
    "verify plan.corn --json",
    "explore --out page.html --no-open --json",
    "train --plan plan.corn --task breast-cancer --step-size 0.1 --json",
    "launch plan.corn --task breast-cancer --step-size 0.1 --batch-size 16 --out run --json",
    "keys ledger plan.keys --json",
)


def check_package(package: Path) -> None:
    """Install the package alone, run commands outside of the checkout, and compare versions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        _run([python, "-m", "pip", "install", "--quiet", package.resolve()], folder)
        version = _run([python, "-m", "corn", "--version"], folder).split()[1]
        if f"-{version}" not in package.name:
            sys.exit(f"{package.name} installs version {version}")
        for check in CHECKS:
            answer = json.loads(_run([folder / "env" / "bin" / "corn", *check.split()], folder))
            if answer["corn_version"] != version:
                sys.exit(f"corn {check}: version {answer['corn_version']}")
            _say(f"  corn {check.split()[0]}: done")
        page = (folder / "page.html").read_text(encoding="utf-8")
        if "corn.page" not in page:
            sys.exit("the explorer's scripts are not in the package")


def _run(command: list[str | Path], folder: Path) -> str:
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{process.stdout}{process.stderr}")
    return process.stdout


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    for given in sys.argv[1:]:
        _say(f"{given}:")
        check_package(Path(given))
