"""The exceptions CorN raises on purpose.

::

    CornError                      every expected failure; the command line exits with 1
    ├── InvalidArgumentError       a value outside what a function accepts (also a ValueError)
    ├── FileFormatError            a file that is missing, unreadable or not what it should be
    ├── InfeasibleError            no object with the properties asked for exists
    └── MissingExtraError          an optional dependency is not installed

    CornWarning                    the result is sound, but not what the caller may expect
"""


class CornError(Exception):
    """Base of every failure that a caller can act on."""


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


class CornWarning(UserWarning):
    """A result is sound, but something about it deserves attention."""
