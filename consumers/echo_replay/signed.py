"""Is every trained sample signed by the worker that it names? Of a run whose [trust] requires signatures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from echo_bus.client.cluster import RawMessage
from echo_replay.books import Samples
from echo_replay.verdicts import Finding, Promise
from echo_schemas.errors import InvalidRecord
from echo_schemas.projection import Projection
from echo_schemas.records import Trajectory
from echo_schemas.registry import SchemaIds
from echo_schemas.topics import TRAJECTORIES

if TYPE_CHECKING:
    from echo_bus.signatures import Verifier


class SignatureCheck:
    """Looks at the messages of `trajectories` as they go by, and keeps where those lie that no trusted key has signed."""

    def __init__(self, verifier: Verifier, ids: SchemaIds) -> None:
        self._verifier = verifier
        self._read = Projection(Trajectory, ("worker_id",), ids).read
        self._unsigned: dict[tuple[int, int], str] = {}

    def watch(self, batches: Iterable[list[RawMessage]]) -> Iterator[list[RawMessage]]:
        """The same batches."""
        for batch in batches:
            for raw in batch:
                try:
                    (worker_id,) = self._read(raw.value())
                    self._verifier.signer_of(raw).require_author(TRAJECTORIES, worker_id.decode(errors="replace"))
                except InvalidRecord as exc:
                    self._unsigned[raw.partition() or 0, raw.offset() or 0] = exc.message
            yield batch

    def finding(self, samples: Samples) -> Finding:
        """What is said of the promise."""
        finding = Finding(Promise.SIGNED, num_looked_at=len(samples.offsets))
        places = zip(samples.partitions.tolist(), samples.offsets.tolist(), samples.versions.tolist(), strict=True)
        for partition, offset, version in places:
            if why := self._unsigned.get((partition, offset)):
                finding.broken(f"A trained record has no good signature: {why}", partition=partition, offset=offset, version=version)
        if self._unsigned:
            finding.note(
                f"{len(self._unsigned)} records of the topic are not signed by who they name; those that were not trained harm nobody"
            )
        return finding
