"""The newest adapter of a run in PEFT, from the log alone: load_adapter.py localhost:9092 echo.demo my-run models/base adapter

It needs Kafka's client, our schemas (`pip install echoswarm`, no extras) and PEFT. What the records hold: docs/weights.md.
"""

import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from peft import PeftModel
from transformers import AutoModelForCausalLM

from echo_schemas.codec import Codec
from echo_schemas.records import Chunk, WeightManifest
from echo_schemas.registry import LockFileRegistry


def records(consumer: Consumer, topic: str, partition: int, first: int = 0) -> Iterator[object]:
    """What the partition holds from the offset `first` on. A run with a registry wants `HttpRegistry` here."""
    codec = Codec(LockFileRegistry())
    consumer.assign([TopicPartition(topic, partition, max(first, consumer.get_watermark_offsets(TopicPartition(topic, partition))[0]))])
    while (message := consumer.poll(30)) is not None and message.error() is None:
        if message.value() is not None:
            yield codec.decode(message.value())


def load(bootstrap: str, namespace: str, run: str, base: str, folder: Path) -> tuple[PeftModel, WeightManifest]:
    """Write the adapter to `folder`, and put it upon the model in `base`."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "nobody", "enable.auto.commit": False, "enable.partition.eof": True}
    consumer = Consumer(settings)
    weights = f"{namespace}.weights"
    partitions = consumer.list_topics(weights, 30).topics[weights].partitions
    published = [each for number in partitions for each in records(consumer, weights, number)]
    manifest = max((each for each in published if isinstance(each, WeightManifest) and each.run_id == run), key=lambda each: each.version)
    assert manifest.blob is not None, f"it lies at {manifest.uri}, not in the log"
    chunks: dict[int, bytes] = {}
    for each in records(consumer, f"{namespace}.{manifest.blob.topic}", manifest.blob.partition, manifest.blob.first_offset):
        if isinstance(each, Chunk) and (each.run_id, each.blob) == (run, manifest.blob.blob):
            chunks[each.index] = each.data
        if len(chunks) == manifest.blob.num_chunks:
            break
    consumer.close()
    rest = b"".join(chunks[index] for index in sorted(chunks))
    assert sha256(rest).hexdigest() == manifest.sha256, "retention has taken a part of it, or it is damaged"
    for file in manifest.files:
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(rest[: file.num_bytes])
        rest = rest[file.num_bytes :]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder), manifest


if __name__ == "__main__":
    bootstrap, namespace, run, base, into = sys.argv[1:]
    model, manifest = load(bootstrap, namespace, run, base, Path(into))
    print(f"version {manifest.version} of {manifest.run_id}, {manifest.num_bytes:,} bytes, sha256 {manifest.sha256}")
    model.print_trainable_parameters()
