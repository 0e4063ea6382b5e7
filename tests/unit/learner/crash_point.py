"""Where a learner's process dies in a test: at a call to the cluster, out of which nothing comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable

TRANSACTION_CALLS = ("init_transactions", "begin_transaction", "commit_transaction", "abort_transaction")
CLIENT_CALLS = (*TRANSACTION_CALLS, "produce", "flush")


class Crash(BaseException):
    """The process dies here: nothing catches it."""


class CrashPoint:
    """The `number`-th call that `matches` does not come back, nor does any later call of a transaction. Counts even if it never comes."""

    def __init__(self, number: int, matches: Callable[[str], bool]) -> None:
        self.calls: list[str] = []
        self._number = number
        self._matches = matches
        self._died = threading.Event()

    @property
    def reached(self) -> bool:
        """Whether the process died."""
        return self._died.is_set()

    def __call__(self, operation: str) -> None:
        if self._died.is_set() and operation in TRANSACTION_CALLS:
            raise Crash
        if self._matches(operation):
            self.calls.append(operation)
            if len(self.calls) == self._number:
                self._died.set()
                raise Crash


def calls_of(thread: str) -> Callable[[str], bool]:
    """Calls to the cluster that one of a learner's threads makes: `MainThread`, or `publication`."""
    return lambda operation: operation in CLIENT_CALLS and threading.current_thread().name.startswith(thread)
