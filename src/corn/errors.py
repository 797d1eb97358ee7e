"""The exceptions CorN raises on purpose.

::

    CornError                      every expected failure; the command line exits with 1
    ├── InvalidArgumentError       a value outside what a function accepts (also a ValueError)
    ├── FileFormatError            a file that is missing, unreadable or not what it should be
    ├── InfeasibleError            no object with the properties asked for exists
    ├── MissingExtraError          an optional dependency is not installed
    ├── PublicError                a failure of a run that other agents may be told of
    └── StoppedByUserError         Ctrl-C ended a command early; the command line exits with 130

    CornWarning                    the result is sound, but not what the caller may expect
"""


def make_printable(text: str, *, limit: int | None = None) -> str:
    r"""Return text as one line without control characters, of about ``limit`` characters at most.

    Files and other agents can hold escape codes, which would do things to a terminal, and any
    amount of text. The middle is left out, because the end often tells most.

    >>> make_printable("clear\x1b[2J\nthe screen")
    'clear\\x1b[2J the screen'
    >>> make_printable("0123456789", limit=5)
    '01…89'
    """
    line = " ".join(_shorten(text, limit).split())
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return _shorten("".join(escaped), limit)


def _shorten(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[-(limit // 2) :]}"


class CornError(Exception):
    """Base of every failure that a caller can act on; its message is one printable line."""

    def __str__(self) -> str:
        """Return the message, whatever it quotes, as a line that is safe to show."""
        return make_printable(super().__str__())


class InvalidArgumentError(CornError, ValueError):
    """An argument is outside its domain; the message names it, its value and what is accepted."""


class FileFormatError(CornError):
    """A file is missing, cannot be read, or does not hold what its name promises."""


class InfeasibleError(CornError):
    """The request is well formed, but nothing satisfies it."""


class MissingExtraError(CornError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, *, extra: str) -> None:
        super().__init__(f"{feature} needs an extra: pip install 'corn-dsgd[{extra}]'")


class PublicError(CornError):
    """A failure whose message may be told to other agents: nothing in it depends on data."""


class StoppedByUserError(CornError):
    """A person ended a command before it was done; the message says what was kept."""


class CornWarning(UserWarning):
    """A result is sound, but something about it deserves attention."""
