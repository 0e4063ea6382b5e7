"""How the checkpoints of a run relate to the one that the log's tip names. Pure.

    v3-a ─ v4-a ─ v5-a (tip) ─ v6-b        older, older, tip, unpublished
              └── v5-c ─ v6-c              dead: the log will never name them, and no start goes on from them

A chain of parents may have gaps, since older checkpoints are removed. Where a gap leaves a doubt, the relation is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol


class Relation(StrEnum):
    """A checkpoint's relation to the tip."""

    TIP = "tip"
    UNPUBLISHED = "unpublished"
    OLDER = "older"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Checkpointed(Protocol):
    """The fields of a checkpoint that are used here."""

    @property
    def parent(self) -> str | None: ...
    @property
    def version(self) -> int: ...


def comes_from(node: Checkpointed, root: str | None, nodes: Mapping[str, Checkpointed]) -> bool:
    """Whether the parents of `node` lead to `root`; None: to the very start."""
    parent = node.parent
    while parent != root:
        if parent is None or parent not in nodes:
            return False
        parent = nodes[parent].parent
    return True


def relations(nodes: Mapping[str, Checkpointed], tip: str) -> dict[str, Relation]:
    """The relation of each checkpoint of a run, by its id. OLDER: an ancestor, or below the tip's version and of unknown descent."""
    if tip not in nodes:
        return dict.fromkeys(nodes, Relation.UNKNOWN)
    ancestors = set(_chain(tip, nodes))
    end = _end_of(tip, nodes)
    return {name: _relation(name, tip, nodes, ancestors, end) for name in nodes}


def _relation(name: str, tip: str, nodes: Mapping[str, Checkpointed], ancestors: set[str], end: str | None) -> Relation:
    if name == tip:
        return Relation.TIP
    if name in ancestors:
        return Relation.OLDER
    chain = _chain(name, nodes)
    if tip in chain:
        return Relation.UNPUBLISHED
    if not ancestors.isdisjoint(chain) or _end_of(name, nodes) == end:
        # It branches off before the tip, at a checkpoint that is here or at the missing one where the tip's chain ends.
        return Relation.DEAD
    return Relation.OLDER if nodes[name].version < nodes[tip].version else Relation.UNKNOWN


def _chain(name: str, nodes: Mapping[str, Checkpointed]) -> list[str]:
    """The checkpoint and its ancestors, as far as they are there."""
    chain: list[str] = []
    here: str | None = name
    while here is not None and here in nodes:
        chain.append(here)
        here = nodes[here].parent
    return chain


def _end_of(name: str, nodes: Mapping[str, Checkpointed]) -> str | None:
    """The parent at which the chain ends: one that is not there, or None at the very start."""
    return nodes[_chain(name, nodes)[-1]].parent
