"""CorN: decentralised learning with noise that agents draw jointly, so that it cancels."""

__version__ = "0.1.0"
