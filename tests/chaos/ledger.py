"""What the log says was trained, and whether it can be true: a chain of steps without a gap, and nothing twice."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.records import Drop, StepReport
from echo_schemas.topics import DROPS, STEPS

_READ_S = 120.0


@dataclass(frozen=True)
class Ledger:
    """`faults`: sentences about what must not be; empty if all is well."""

    num_steps: int
    num_trained: int
    faults: tuple[str, ...]


def read_ledger(bus: Bus) -> Ledger:
    """Read `steps` and `drops` to their ends and check them."""
    with closing(bus.reader([STEPS, DROPS])) as reader:
        reader.start()
        records = [message.record for batch in reader.read_to_end(Deadline.after(_READ_S)) for message in batch]
    reports = [record for record in records if isinstance(record, StepReport)]
    faults: list[str] = []
    versions = [report.version for report in reports]
    if versions != list(range(1, len(versions) + 1)):
        wrong = next(index for index, version in enumerate(versions) if version != index + 1)
        faults.append(f"report {wrong} is of version {versions[wrong]}")
    faults += [
        f"version {later.version} comes from checkpoint {later.parent}, and its predecessor is {earlier.checkpoint}"
        for earlier, later in itertools.pairwise(reports)
        if later.parent != earlier.checkpoint
    ]
    samples: Counter[tuple[int, int]] = Counter()
    seqs: Counter[int] = Counter()
    for report in reports:
        assert report.batch is not None, "the batches of these runs are short"
        samples.update(
            zip(
                np.frombuffer(report.batch.partitions, TOKEN_DTYPE).tolist(),
                np.frombuffer(report.batch.offsets, OFFSET_DTYPE).tolist(),
                strict=True,
            )
        )
        seqs.update(set(np.frombuffer(report.batch.seqs, OFFSET_DTYPE).tolist()))
    faults += [f"sample {where} was trained {count} times" for where, count in samples.items() if count > 1]
    faults += [f"seq {seq} was trained in {count} steps" for seq, count in seqs.items() if count > 1]
    closed = {record.seq for record in records if isinstance(record, Drop) and record.what is None}
    faults += [f"seq {seq} was trained and dropped" for seq in sorted(closed & seqs.keys() - {None})]
    return Ledger(num_steps=len(reports), num_trained=sum(samples.values()), faults=tuple(faults))
