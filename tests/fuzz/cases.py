"""Runs hostile messages of one topic through everything that reads it; says which case fell, and how to repeat it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from echo_bus.dead_letters import dead_letter_of
from echo_bus.message import Message, raw_headers
from echo_bus.reading.decoding import Decoder
from echo_bus.wire import Wire
from echo_memory.message import MemoryMessage
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import InvalidRecord
from echo_schemas.topics import BY_NAME, TOPICS
from tests.fuzz.mutations import NAMESPACE, NUM_PARTITIONS, RUN, Forger
from tests.fuzz.readers import READERS, Reader, fits

# Far above what any case takes; a stranger must not buy a minute with a record.
_MOST_S = 5.0


@dataclass
class Tally:
    """What became of the cases of one topic."""

    topic: str
    num_read: int = 0
    num_invalid: int = 0
    num_ignored: int = 0
    slowest_s: float = 0.0
    readers: list[str] = field(default_factory=list)


class Fell(AssertionError):
    """A reader raised what it must not, or took too long."""


def run_cases(name: str, num_cases: int, *, seed: int = 0, first: int = 0) -> Tally:
    """Cases `first` to `first + num_cases` of a topic. Raises Fell."""
    topic, codec = BY_NAME[name], lock_file_codec()
    forger = Forger(topic, codec)
    decoder = Decoder(Wire(namespace=NAMESPACE, role="fuzz", codec=codec, run_id=RUN), TOPICS)
    decoder.set_num_partitions(dict.fromkeys(decoder.topics_with_placement, NUM_PARTITIONS))
    readers = [make(codec) for make in READERS.get(name, ())]
    tally = Tally(name, readers=[type(reader).__name__ for reader in readers])
    for number in range(first, first + num_cases):
        raw = forger.hostile(random.Random(f"{name}/{seed}/{number}"), number)
        began_s = time.process_time()
        try:
            _judge(raw, decoder, readers, tally)
        except Exception as exc:
            raise Fell(f"{name}, case {number}: {exc!r}. Again: python -m tests.fuzz --topic {name} --seed {seed} --case {number}") from exc
        took_s = time.process_time() - began_s
        tally.slowest_s = max(tally.slowest_s, took_s)
        if took_s > _MOST_S:
            raise Fell(f"{name}, case {number} took {took_s:.1f} s (--seed {seed})")
    for number, reader in enumerate(readers):
        message = decoder.decode(forger.honest(number))
        assert message is not None, "an example belongs to the run"
        reader.read(message)
        reader.check()
    return tally


def _judge(raw: MemoryMessage, decoder: Decoder, readers: list[Reader], tally: Tally) -> None:
    for reader in readers:
        try:
            reader.look(raw)
        except InvalidRecord as invalid:
            _bury(raw, invalid)
    try:
        message = decoder.decode(raw)
    except InvalidRecord as invalid:
        tally.num_invalid += 1
        _bury(raw, invalid)
        return
    if message is None or message.record is None:
        tally.num_ignored += 1
        return
    tally.num_read += 1
    _show(message)
    for reader in readers:
        reader.read(message)


def _show(message: Message) -> None:
    """What commands and screens do with any record."""
    assert message.coordinates.offset == message.offset
    assert isinstance(dict(message.headers), dict)
    repr(message.record)


def _bury(raw: MemoryMessage, invalid: InvalidRecord) -> None:
    """The copy that a reader would write, whole and over the budget, and once more when it is read again from the dead letters."""
    for whole in (True, False):
        letter = dead_letter_of(raw, invalid, group="g", whole=whole)
        fits(letter.key, letter.value, letter.headers)
    again = MemoryMessage("fuzz.again", 0, 1, letter.key, letter.value, letter.headers)
    assert len(dead_letter_of(again, invalid, group="g").headers) <= len(raw_headers(raw)) + 30
