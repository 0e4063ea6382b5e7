"""What was dropped since the last batch: why a learner waits although samples come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from echo_core.groups import DropDecision


class DropsSinceBatch:
    """Counts of samples by reason, and the last sentence about one. The caller holds a lock."""

    def __init__(self) -> None:
        self._samples: Counter[str] = Counter()
        self._last = ""

    def add(self, drops: Iterable[DropDecision]) -> None:
        """These were dropped."""
        for drop in drops:
            if drop.where is not None:
                self._samples[drop.why.value] += 1
            self._last = drop.detail or self._last

    def clear(self) -> None:
        """There is a batch."""
        self._samples.clear()
        self._last = ""

    def sentence(self) -> str:
        """Empty if nothing was dropped."""
        if not self._samples:
            return ""
        reasons = ", ".join(f"{number:,} as {why}" for why, number in self._samples.most_common())
        last = f" The last one: {self._last}" if self._last else ""
        return f"Since the last batch samples were dropped: {reasons}.{last}"
