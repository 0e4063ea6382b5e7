"""`python -m tests.fuzz.guided --seconds 60`: bytes led by what the code does with them (atheris), for what reads bytes of strangers.

Of each kind of record: the generated reader and fastavro say the same, also behind another record, and the codec ends with a record or a
refusal. Beginning: the example records. Exits 1 at a difference, which atheris leaves in a file `crash-*`; `--repeat FILE` repeats one.
Without atheris (`pip install atheris`, Linux, up to Python 3.13) it says so and exits 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import fastavro

from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import RECORDS, Record
from echo_schemas.schemas import newest
from echo_schemas.straight import reader_of
from echo_schemas.topics import TOPICS
from tests.examples import load_examples

_MOST_BYTES = 4_096
_CODEC = lock_file_codec()
_READERS = [(record, reader_of(record, newest(record.SCHEMA))) for record in RECORDS]


def judge(data: bytes) -> None:
    """The first byte chooses the kind of record; the rest are two records of it, the first as long as the second byte says."""
    if len(data) < 2:
        return
    record, read = _READERS[data[0] % len(_READERS)]
    length = data[1] * 8
    for body in (data[2 : 2 + length], data[2 + length :]):
        _compare(record, read, body)


def _compare(record: type[Record], read: Any, body: bytes) -> None:
    prefix = b"\x00" + _CODEC.ids.id_of(newest(record.SCHEMA)).to_bytes(4, "big")
    with contextlib.suppress(InvalidRecord):
        _CODEC.decode(prefix + body)
    try:
        found = read(body, 0)
    except Exception:  # any error: the codec asks fastavro
        return
    buffer = io.BytesIO(body)
    plain: Any = fastavro.schemaless_reader(buffer, newest(record.SCHEMA).parsed, None)
    assert buffer.tell() == len(body), f"{len(body) - buffer.tell()} bytes of a {record.__name__} were left out"
    expected = converter_of(record).from_plain(plain)
    assert repr(found) == repr(expected), f"{found!r} is not {expected!r}"


def write_examples(folder: Path) -> None:
    """A file for each example record, twice the same one behind another."""
    places = {record: place for place, (record, _) in enumerate(_READERS)}
    for topic in TOPICS:
        for name, record in load_examples(topic).items():
            body = _CODEC.encode(record)[5:]
            rest = -len(body) % 8
            # The first of both must end where the second byte says, so only such ones come twice.
            twice = bytes([len(body) // 8]) + body + body if not rest and len(body) < 2_048 else b"\x00" + body
            (folder / f"{topic.name}.{name}").write_bytes(bytes([places[type(record)]]) + twice)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--repeat", type=Path)
    options = parser.parse_args()
    if options.repeat is not None:
        judge(options.repeat.read_bytes())
        return 0
    try:
        import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional, and without types
    except ImportError:
        sys.stdout.write("Nothing was tried: atheris is not installed (pip install atheris).\n")
        return 0
    for place, (record, read) in enumerate(_READERS):
        _READERS[place] = record, atheris.instrument_func(read)
    with tempfile.TemporaryDirectory() as folder:
        write_examples(Path(folder))
        atheris.Setup([sys.argv[0], f"-max_total_time={options.seconds}", f"-max_len={_MOST_BYTES}", "-print_final_stats=1", folder], judge)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
