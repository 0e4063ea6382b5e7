"""A machine of its own for one role, as far as the network goes: a namespace behind a bridge, whose cable can be pulled. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

from tests.chaos.undo import Undo

_IP_S = 20.0


class Namespace:
    """`bridge_address` is this side's address, where the namespace reaches what listens here."""

    def __init__(self, tag: str, subnet: int) -> None:
        """`tag`: at most eight letters that tell this network from others on the machine; `subnet`: the third byte of its addresses."""
        self.name = f"{tag}-ns"
        self._bridge, self._cable = f"{tag}-br", f"{tag}-v"
        self.bridge_address = f"10.199.{subnet}.254"
        self._own_address = f"10.199.{subnet}.1"

    @staticmethod
    def why_not() -> str | None:
        """Why no namespace can be made here; None if it can."""
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "the command `ip` is missing (iproute2)"
        probe = f"probe-{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=_IP_S, check=False)
        if made.returncode != 0:
            return f"this kernel or container allows no network namespaces: {made.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=_IP_S, check=False)
        return None

    @property
    def command(self) -> tuple[str, ...]:
        """Put before a command to run it inside."""
        return ("ip", "netns", "exec", self.name)

    def __enter__(self) -> Self:
        self._undo = Undo(("ip", "netns", "del", self.name), ("ip", "link", "del", self._cable), ("ip", "link", "del", self._bridge))
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"{self.bridge_address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            _ip("netns", "add", self.name)
            _ip("link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            _ip("link", "set", self._cable, "master", self._bridge, "up")
            _ip("-n", self.name, "addr", "add", f"{self._own_address}/24", "dev", "eth0")
            _ip("-n", self.name, "link", "set", "eth0", "up")
            _ip("-n", self.name, "link", "set", "lo", "up")
        except BaseException:  # half a network must not stay
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._undo.run()

    def pull_cable(self) -> None:
        """No packet goes in or out."""
        _ip("link", "set", self._cable, "down")

    def plug_cable(self) -> None:
        """Packets go again."""
        _ip("link", "set", self._cable, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_IP_S)
