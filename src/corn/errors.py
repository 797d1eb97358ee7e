"""The exceptions that CorN raises on purpose: for each expected failure, a `CornError`."""

from collections.abc import Iterable


def make_printable(text: str, *, limit: int | None = None) -> str:
    r"""Return text as one line without control characters, of about ``limit`` characters at most.

    Text from files and other agents can contain escape codes, which would control a terminal. The
    middle is cut, because the end is often the most informative part.

    >>> make_printable("clear\x1b[2J\nthe screen"), make_printable("0123456789", limit=5)
    ('clear\\x1b[2J the screen', '01…89')
    """
    line = " ".join(_shorten(text, limit).split())
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return _shorten("".join(escaped), limit)


def _shorten(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return f"{text[: limit // 2]}…{text[-(limit // 2) :]}"


def list_some(items: Iterable[object], *, limit: int = 5) -> str:
    """Return the first few items, each printable and short, and how many more there are."""
    listed = [make_printable(str(item), limit=60) for item in items]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


class CornError(Exception):
    """The base of all failures that a caller can act on; the command line exits with 1.

    The message is one printable line.

    >>> from corn import load_network
    >>> try:
    ...     load_network("rung:4")
    ... except CornError as error:
    ...     print(str(error)[:22])
    unknown graph 'rung:4'
    """

    def __str__(self) -> str:
        """Return the message as one line that is safe to print, whatever it quotes."""
        return make_printable(super().__str__())


class InvalidArgumentError(CornError, ValueError):
    """An argument outside its domain; the message has its name, the rule and the value found."""


class FileFormatError(CornError):
    """A file that is missing, cannot be read, or is not in the expected format."""


class InfeasibleError(CornError):
    """A well-formed request that nothing satisfies."""


class MissingExtraError(CornError, ImportError):
    """A feature whose optional dependency is not installed."""

    def __init__(self, feature: str, *, extra: str) -> None:
        super().__init__(f"{feature} needs an extra: pip install 'corn-dsgd[{extra}]'")


class PublicError(CornError):
    """A failure whose message other agents may receive: nothing in it depends on data."""


class StoppedByUserError(CornError):
    """A command that Ctrl-C ended early, with exit code 130; the message states what was kept."""


class CornWarning(UserWarning):
    """A sound result with a property that the caller may not expect.

    >>> import warnings
    >>> from corn import PrivacyBudget
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always", CornWarning)
    ...     budget = PrivacyBudget(40, 1e-5, num_steps=10, clip=1, accounting="paper")
    >>> caught[0].category.__name__
    'CornWarning'
    """
