"""Agents that are lost, survivors that go on, and agents that come back."""
