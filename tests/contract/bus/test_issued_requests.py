"""The requests that can still matter, written by transactions as a feeder writes them: found from the end backwards on either cluster."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from echo_bus.clock import Deadline
from echo_bus.requests.issued_requests import read_issued
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Purpose, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS
from tests.contract.bus.conftest import PATIENCE_S

NUM_PARTITIONS, NUM_BATCHES, BATCH = 2, 20, 50
FLOOR = (NUM_BATCHES - 2) * BATCH


def request(seq: int) -> RolloutRequest:
    return RolloutRequest(
        run_id="demo",
        group_id=group_id_of("demo", seq),
        seq=seq,
        purpose=Purpose.TRAIN,
        task="letters",
        prompt_token_ids=pack_tokens([1]),
        group_size=2,
        sampling=Sampling(max_new_tokens=4),
        required_version=0,
        learner_version=0,
        issued_ms=1,
    )


def test_the_open_seqs_are_found_without_reading_what_lies_before_them(kit: Any) -> None:
    kit.create(REQUESTS, num_partitions=NUM_PARTITIONS)
    with closing(kit.bus.transactions("feeder")) as writer:
        writer.start()
        for start in range(0, NUM_BATCHES * BATCH, BATCH):
            with writer.transaction() as transaction:
                for seq in range(start, start + BATCH):
                    transaction.publish(REQUESTS, request(seq), partition=seq % NUM_PARTITIONS)
    # Half a batch and a marker for each transaction and partition.
    end = NUM_BATCHES * (BATCH // NUM_PARTITIONS + 1)
    with closing(kit.bus.look([REQUESTS])) as reader:
        assert set(reader.bounds().values()) == {(0, end)}
        patience = Deadline.after(PATIENCE_S)
        found = read_issued(reader, floor=FLOOR, committed=dict.fromkeys(range(NUM_PARTITIONS), end), since_ms=None, patience=patience)
    assert {issued.seq for issued in found if issued.seq >= FLOOR} == set(range(FLOOR, NUM_BATCHES * BATCH))
    assert len(found) < NUM_BATCHES * BATCH * 2 // 3
    assert [(issued.partition, issued.offset) for issued in found] == sorted((issued.partition, issued.offset) for issued in found)
