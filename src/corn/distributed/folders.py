"""Where a run is written: one folder that may be handed out, and one that is its owners' alone.

Nothing that is computed from private data without noise is in the shared folder. A rehearsal's
noise is public and protects nothing, so all that a rehearsal writes is private.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from corn.errors import CornError


@dataclass(frozen=True)
class Folders:
    """The folders of a run, or of one agent of it.

    Attributes:
        shared: models, measurements on public data, ε spent: may be handed out.
        private: measurements on private data, private notes, checkpoints: for the owner's eyes.
    """

    shared: Path
    private: Path

    @classmethod
    def of_run(cls, out: Path, *, is_rehearsal: bool = False) -> Folders:
        """The two folders in the folder of a run."""
        private = out / "private"
        return cls(private / "rehearsal" if is_rehearsal else out / "shared", private)

    def of_agent(self, agent: int) -> Folders:
        """One agent's part of both.

        >>> Folders.of_run(Path("out")).of_agent(3).private.as_posix()
        'out/private/agent-3'
        """
        name = f"agent-{agent}"
        return Folders(self.shared / name, self.private / name)

    def make(self) -> None:
        """Make both folders; the private one can be opened by its owner only, made before or not.

        The folder that it lies in must be there, or be made with it.
        """
        path = self.private
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)
            path = self.shared
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CornError(f"{path}: cannot be made: {error.strerror}") from error


def make_folders(out: Path, agent: int, *, is_rehearsal: bool) -> Folders:
    """Make the folders of a run and those of one of its agents, and return the latter."""
    run = Folders.of_run(out, is_rehearsal=is_rehearsal)
    own = run.of_agent(agent)
    run.make()
    own.make()
    return own


def append_private_note(folder: Path, text: str) -> None:
    """Add a line to the notes in a private folder, which their owner alone can read."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(folder / "notes.txt", flags, mode=0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as stream:
        stream.write(" ".join(text.split()) + "\n")
