"""A snapshot as the blocks that Parallax's nodes fetch: safetensors files of a layer each, named by what they contain (IPFS's CID).

A node is told which tensor is in which block, fetches the blocks with tensors of its own layers, and checks them by their CIDs.
"""

from __future__ import annotations

import importlib
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from echo_rollout.engines.parallax_options import ParallaxOptions
from echo_rollout.engines.pipeline import LAYER

_LENGTH = struct.Struct("<Q")


class BlockStore(Protocol):
    """Where nodes get blocks from."""

    def put(self, block: bytes) -> str:
        """Offer `block` from now on; returns its CID."""

    def remove(self, cid: str) -> None:
        """Offer it no more."""

    def peer_id(self) -> str:
        """The Lattica id under which the blocks are offered."""

    def close(self) -> None:
        """Offer nothing more."""


class LatticaStore:
    """Blocks over Lattica, the peer-to-peer network of Parallax's nodes. Its calls block. Imports lattica."""

    def __init__(self, options: ParallaxOptions) -> None:
        self._folder = tempfile.mkdtemp(prefix="echoswarm-blocks-")
        paths = {name: str(Path(self._folder) / name) for name in ("key", "blocks", "dht")}
        builder = importlib.import_module("lattica").Lattica.builder()
        builder = builder.with_listen_addrs([options.listen]).with_bootstraps(list(options.peers)).with_mdns(False).with_upnp(False)
        builder = builder.with_key_path(paths["key"]).with_storage_path(paths["blocks"]).with_dht_db_path(paths["dht"])
        self._lattica: Any = builder.build()

    def put(self, block: bytes) -> str:
        return str(self._lattica.put_block(block))

    def remove(self, cid: str) -> None:
        self._lattica.remove_block(cid)

    def peer_id(self) -> str:
        return str(self._lattica.peer_id())

    def close(self) -> None:
        self._lattica.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def blocks_of(folder: Path) -> Iterator[tuple[list[str], bytes]]:
    """The snapshot in `folder`, a layer (or what belongs to none) at a time: the tensors' names, and a safetensors file of them."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            header: dict[str, Any] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            start = _LENGTH.size + length
            layers: dict[str, list[str]] = {}
            for name in header:
                found = LAYER.search(name)
                # A tensor of no layer is a block of its own: the embedding and the output layer are large, and at different nodes.
                layers.setdefault(found[1] if found else name, []).append(name)
            for names in layers.values():
                parts, described, end = [], {}, 0
                for name in names:
                    first, last = header[name]["data_offsets"]
                    opened.seek(start + first)
                    parts.append(opened.read(last - first))
                    described[name] = {**header[name], "data_offsets": [end, end := end + last - first]}
                head = json.dumps(described).encode()
                yield names, b"".join([_LENGTH.pack(len(head)), head, *parts])
