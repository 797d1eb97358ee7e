"""The version of the package, also read by its build."""

__version__ = "0.3.0"
