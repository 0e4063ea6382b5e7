"""The root of every error that EchoSwarm raises, and the errors of the record layer.

    EchoError                      message = one sentence, hint = what to do about it
    ├── UserError                  a mistake in a file, a flag or an environment; shown without a traceback
    │   └── SchemaFileError        a topic file, schema file or registry lock contradicts itself
    ├── InvalidRecord              these bytes or this record can never be accepted; carries an InvalidReason
    └── RegistryError              the schema registry refused or did not answer

The transport's errors (`echo_bus.errors`) are a separate branch below EchoError.
"""

from __future__ import annotations

from enum import StrEnum


class EchoError(Exception):
    """Base of all errors of the project. `hint` says what to do; empty if there is nothing to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()


class UserError(EchoError):
    """A mistake of the user, who can correct it."""


class SchemaFileError(UserError):
    """A file below `schemas/` contradicts itself or another one."""


class RegistryError(EchoError):
    """The schema registry refused a schema, does not know an id, or did not answer."""


class NotRegistered(RegistryError):
    """The schema registry answers that it does not have a schema."""


class InvalidReason(StrEnum):
    """Why a message can never be accepted: a metric label and a dead-letter header."""

    NULL_VALUE = "null_value"
    BAD_MAGIC = "bad_magic"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    UNKNOWN_SCHEMA = "unknown_schema"
    UNEXPECTED_RECORD = "unexpected_record"
    OVERSIZED = "oversized"
    KEY_MISMATCH = "key_mismatch"
    PARTITION_MISMATCH = "partition_mismatch"
    NEGATIVE_NUMBER = "negative_number"
    NOT_FINITE = "not_finite"
    LENGTH_MISMATCH = "length_mismatch"
    INCONSISTENT = "inconsistent"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    HANDLER_REFUSED = "handler_refused"
    NOT_ASKED = "not_asked"
    BAD_SIGNATURE = "bad_signature"
    RETRIES_EXHAUSTED = "retries_exhausted"


# Messages quote untrusted bytes, and go to headers and logs.
_MOST_SAID = 1_000


class InvalidRecord(EchoError):
    """A message or record that can never be accepted, and why. The text is cut to a thousand characters."""

    def __init__(self, reason: InvalidReason, message: str, *, hint: str = "") -> None:
        super().__init__(message if len(message) <= _MOST_SAID else f"{message[: _MOST_SAID - 1]}…", hint=hint)
        self.reason = reason
