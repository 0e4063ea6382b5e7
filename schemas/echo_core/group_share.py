"""Which groups belong to a share of all: the same ones in every process, before and after a restart."""

from __future__ import annotations

import hashlib

_HASH_BYTES = 8


def is_chosen(group_id: str, share: float) -> bool:
    """Whether a group is among the `share` of all. By its name, so that everybody with the same share chooses the same groups, all samples
    of one, and those of a smaller share are among those of a larger one.
    """
    if share >= 1.0:
        return True
    digest = hashlib.blake2b(group_id.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < share * (1 << 8 * _HASH_BYTES)
