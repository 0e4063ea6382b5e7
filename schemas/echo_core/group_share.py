"""Chooses a share of all groups: the same groups in every process, also after a restart."""

from __future__ import annotations

import hashlib

_HASH_BYTES = 8


def is_chosen(group_id: str, share: float) -> bool:
    """Whether a group belongs to the `share`. It depends on the group's name only, so all processes with one share choose the same groups,
    and a larger share contains a smaller one."""
    if share >= 1.0:
        return True
    digest = hashlib.blake2b(group_id.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) < share * (1 << 8 * _HASH_BYTES)
