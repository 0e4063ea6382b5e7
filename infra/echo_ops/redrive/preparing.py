"""What to write for a letter, or why nothing. No I/O except in `whole`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME
from confluent_kafka import Message as ClientMessage

from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.dead_letters import RETRIES
from echo_bus.wire import Wire
from echo_ops.redrive.letters import REDRIVEN, Letter
from echo_schemas.errors import EchoError, InvalidReason, InvalidRecord, UserError
from echo_schemas.headers import SIGNATURE
from echo_schemas.records import Record
from echo_schemas.topics import Topic
from echo_tasks.catalogue import import_object

MOST_REDRIVES = 2
"""How often a message is redriven. After a third failure it needs another mend, and a new message."""
_NO_KEY = "What a mend returns is signed by the redrive, which has no key here: `echoswarm keys new redrive` makes one."
Whole = Callable[[Letter], Letter | None]
"""The whole letter of a cut one, from its topic; None if the topic does not hold it any more."""
Mend = Callable[[Letter], Record | bytes | None]
"""Returns the correct record, or its bytes; None leaves the letter where it is. `letter.value` is what was written."""


class Handling(StrEnum):
    """What a redrive does with a letter."""

    WRITE = "write"
    """It is written again."""
    STOP = "stop"
    """It would come straight back: the redrive ends before it, or passes it by if told so."""
    TOO_OFTEN = "too often"
    """It was redriven `MOST_REDRIVES` times: passed by."""
    LEFT = "left"
    """The mend returned None: passed by."""
    REPEATED = "repeated"
    """Another reader's letter of a message that is written again already: passed by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A letter and its handling. `key`, `value`, `headers`, `partition`: the message to write, if `handling` is WRITE; partition None: the
    key decides. `why`: one sentence, if nothing is written."""

    letter: Letter
    handling: Handling
    why: str = ""
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """How letters of one redrive are prepared. `by`: the user and host, for the headers."""

    wire: Wire
    whole: Whole
    by: str
    mend: Mend | None = None

    def prepare(self, letter: Letter, now_ms: int) -> Prepared:
        """The letter with its handling. Raises UserError, which names the letter, if the user's function fails."""
        if letter.num_redriven >= MOST_REDRIVES:
            return Prepared(letter=letter, handling=Handling.TOO_OFTEN, why=f"It was brought back {letter.num_redriven} times before.")
        full = self.whole(letter) if letter.is_cut else letter
        if full is None:
            return _stop(letter, "The copy was cut, and its topic does not hold the original any more.")
        if full.origin is None and _is_placed(full):
            return _stop(letter, "Its headers do not say which partition it was on.")
        try:
            value, record = self._mended(full)
        except InvalidRecord as exc:
            return _stop(letter, f"{exc.reason.value}: {exc.message}")
        if value is None or record is None:
            return Prepared(letter=letter, handling=Handling.LEFT, why="The mend returned None.")
        if len(value) > MAX_RECORD_BYTES:
            return _stop(letter, f"It has {len(value):,} bytes; a record has {MAX_RECORD_BYTES:,} at most.")
        topic = full.topic
        key = full.key
        if topic.key is not None:
            own = topic.key(record).encode()
            if own != key and self.mend is None:
                return _stop(letter, f"Its key is {_shown(key)}, the record's own is {_shown(own)}.")
            key = own
        headers = full.headers
        was_unsigned = all(name != SIGNATURE for name, _ in headers)
        is_signed_anew = (key, value) != (full.key, full.value) or (self.mend is not None and was_unsigned)
        if is_signed_anew:
            # The writer's signature covers the old bytes. The redrive signs the mended ones, and those that a mend returns as they were.
            headers = tuple(header for header in headers if header[0] != SIGNATURE)
            if self.wire.signer is not None and topic.author is not None:
                headers += tuple(self.wire.signer.sign(self.wire.namespace.topic(topic), [(key, value)]))
        try:
            self._require_signature(topic, record, key, value, headers, now_ms)
        except InvalidRecord as exc:
            if is_signed_anew and self.wire.signer is None:
                return _stop(letter, _NO_KEY)
            return _stop(letter, f"Its readers would refuse its signature: {exc.message}")
        return Prepared(
            letter=letter,
            handling=Handling.WRITE,
            key=key,
            value=value,
            headers=(*headers, *self._provenance(letter, now_ms)),
            partition=full.origin.partition if _is_placed(full) and full.origin is not None else None,
        )

    def _require_signature(
        self, topic: Topic, record: Record, key: bytes | None, value: bytes, headers: tuple[tuple[str, bytes], ...], now_ms: int
    ) -> None:
        """Raise InvalidRecord if the readers of the topic would not accept the signature as its author's."""
        if self.wire.verifier is not None and topic.author is not None:
            raw: Any = ClientMessage(
                topic=self.wire.namespace.topic(topic),
                key=key,
                value=value,
                headers=list(headers),
                timestamp=(TIMESTAMP_CREATE_TIME, now_ms),
            )
            self.wire.verifier.signer_of(raw).require_author(topic, topic.author(record))

    def _mended(self, letter: Letter) -> tuple[bytes | None, Record | None]:
        """The bytes to write and their record. Raises InvalidRecord if they are no record of this topic."""
        value: bytes | None = letter.value
        if self.mend is not None:
            try:
                answer = self.mend(letter)
            except Exception as exc:  # the user's function may raise anything
                raise UserError(
                    f"The mend failed at the letter {letter.offset} of {letter.topic.name}: {type(exc).__name__}: {exc}.",
                    hint="This letter and those behind it were not touched; correct the function and run the command again.",
                ) from exc
            if answer is None:
                return None, None
            try:
                value = answer if isinstance(answer, bytes) else self.wire.codec.encode(answer)
            except (EchoError, AttributeError, TypeError) as exc:
                raise UserError(
                    f"The mend made no record of the letter {letter.offset} of {letter.topic.name}: {exc}",
                    hint="It returns a record of echo_schemas.records, the bytes of one, or None.",
                ) from exc
        record = self.wire.codec.decode(value)
        if not isinstance(record, letter.topic.records):
            raise InvalidRecord(InvalidReason.UNEXPECTED_RECORD, f"A {type(record).__name__} does not belong on {letter.topic.name}.")
        return value, record

    def _provenance(self, letter: Letter, now_ms: int) -> tuple[tuple[str, bytes], ...]:
        text = {
            RETRIES: str(letter.num_redriven),
            REDRIVEN + "from": f"{self.wire.namespace.dead_letters(letter.topic)}[0]@{letter.offset}",
            REDRIVEN + "by": self.by,
            REDRIVEN + "ms": str(now_ms),
        }
        return tuple((name, value.encode(errors="replace")) for name, value in text.items())


def with_bytes_of(letter: Letter, original: Letter) -> Letter:
    """`letter` with key, value and headers of the original message."""
    return replace(letter, key=original.key, value=original.value, headers=original.headers, is_cut=False)


def _is_placed(letter: Letter) -> bool:
    return letter.topic.placed or letter.topic.key is None


def _stop(letter: Letter, why: str) -> Prepared:
    return Prepared(letter=letter, handling=Handling.STOP, why=why)


def _shown(key: bytes | None) -> str:
    return "missing" if key is None else repr(key.decode(errors="replace"))


def load_mend(name: str) -> Mend:
    """The function `name` (`file.py:function` or `package.module:function`). Raises UserError if it cannot be loaded."""
    if not all(name.partition(":")):
        raise UserError(f"{name!r} names no function.", hint="Write file.py:function, or package.module:function.")
    found = import_object(name)
    if not callable(found):
        raise UserError(f"{name!r} is no function.", hint="It takes a letter and returns a record, bytes or None.")
    mend: Mend = found
    return mend
