"""Options of logs and of the status server, for ``corn agent`` and ``corn launch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from corn import distributed
from corn.distributed.logs import LogFormat, LogLevel, LogSettings

_MONITORING = "Monitoring"


@dataclass(frozen=True)
class MonitoringOptions:
    """The log of an agent, and its status server."""

    log_format: Annotated[
        LogFormat,
        typer.Option(help="Log lines as text or as JSON.", rich_help_panel=_MONITORING),
    ] = "text"
    log_level: Annotated[
        LogLevel,
        typer.Option(
            help="Least important level to log: info has a line per checkpoint, warning has "
            "losses and other notes only.",
            rich_help_panel=_MONITORING,
        ),
    ] = "info"
    status: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT to serve /healthz, /metrics (Prometheus) and a status page at. With "
            "corn launch, agent I uses PORT + I.",
            rich_help_panel=_MONITORING,
        ),
    ] = None
    status_private: Annotated[
        bool,
        typer.Option(
            "--status-private",
            help="Also serve training loss, gradient norm, clipping and waits, which no noise "
            "protects. Only on an address of this machine, such as 127.0.0.1, and with the "
            "password in private/agent-I/status-password.",
            rich_help_panel=_MONITORING,
        ),
    ] = False

    def make(self) -> distributed.Monitoring:
        """Return the settings."""
        return distributed.Monitoring(
            log=LogSettings(self.log_format, self.log_level),
            status=None if self.status is None else distributed.parse_address(self.status),
            shows_private=self.status_private,
        )
