"""`echoswarm settings`."""

from __future__ import annotations

import sys

from echo_ops.settings_page import settings_page


def settings() -> None:
    """Write plain text, so that it can be piped into a file."""
    sys.stdout.write(settings_page())
