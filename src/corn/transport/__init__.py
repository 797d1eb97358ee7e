"""Connections between agents of a roster: authenticated, encrypted, and safe against replay.

Nothing here knows of plans, models or noise. From the bottom up: ``channel`` (a handshake, then
sealed messages over one connection), ``listener`` (one open port per agent), ``links`` (channels to
neighbours, with threads), and ``store`` (entries that agents leave for each other).
"""

from corn.transport.channel import (
    NO_SESSION,
    Channel,
    ChannelClosedError,
    Credentials,
    Dropout,
    LinkError,
    Purpose,
    TamperedError,
)
from corn.transport.links import Link, LinkOpener, Traffic, open_links
from corn.transport.listener import Address, Listener, UnreachableError, dial
from corn.transport.store import MemoryStore, RemoteStore, StoreHost, StoreLostError

__all__ = [
    "NO_SESSION",
    "Address",
    "Channel",
    "ChannelClosedError",
    "Credentials",
    "Dropout",
    "Link",
    "LinkError",
    "LinkOpener",
    "Listener",
    "MemoryStore",
    "Purpose",
    "RemoteStore",
    "StoreHost",
    "StoreLostError",
    "TamperedError",
    "Traffic",
    "UnreachableError",
    "dial",
    "open_links",
]
