"""The version of the package, also read by its build."""

__version__ = "0.2.0"
