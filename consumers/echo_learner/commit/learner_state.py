"""The learner's state at a version, and its form in a checkpoint's `state.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from echo_core.groups import AssemblyState
from echo_schemas.records import Coordinates, RewardTerm

_POSITIONS = ("trajectory_lows", "trajectory_read_to", "reward_lows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The snapshot of another run from which a fork began."""

    run_id: str
    version: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """The learner's state after `version` steps. `parent`: the checkpoint before; `published`: the newest version in the log.

    `groups_trained` and `groups_dropped` count over the whole lineage. `identities`: of cluster and topics, to notice others of the same
    name. `meaning`: the settings that decide what the weights become. `origin`: in all checkpoints of a fork. `weights_of`: the checkpoint
    whose weights this one links, if it was made for drops alone; `weights_ms`: when that one was made.
    """

    id: str
    parent: str | None
    run_id: str
    session: str
    version: int
    published: int | None
    groups_trained: int
    groups_dropped: int
    assembly: AssemblyState
    terms: tuple[RewardTerm, ...]
    identities: Mapping[str, str]
    meaning: Mapping[str, Any]
    snapshot: str | None
    created_ms: int
    origin: Origin | None = None
    weights_of: str | None = None
    weights_ms: int = 0

    @property
    def step_checkpoint(self) -> str:
        """The checkpoint that the report of this version names."""
        return self.weights_of or self.id


def checkpoint_id(version: int, session: str, number: int = 0) -> str:
    """`v<n>-<session>`; a checkpoint made for drops alone has a `number`."""
    return f"v{version}-{session}.{number}" if number else f"v{version}-{session}"


def version_of(name: str) -> int:
    return int(name[1:].partition("-")[0])


def to_json(state: LearnerState) -> dict[str, Any]:
    """With keys as text, as JSON returns them: the checksum is computed over what is read.

    Written out, because `asdict` would copy hundreds of positions at each step.
    """
    assembly = state.assembly
    return {
        **{each.name: getattr(state, each.name) for each in fields(state)},
        "assembly": {
            "floor": assembly.floor,
            "closed": sorted(assembly.closed),
            "settled": sorted((where.partition, where.offset) for where in assembly.settled),
            "open": {str(seq): [(where.partition, where.offset) for where in lows] for seq, lows in assembly.open.items()},
            **{name: {str(key): value for key, value in getattr(assembly, name).items()} for name in _POSITIONS},
        },
        "terms": [asdict(term) for term in state.terms],
        "origin": None if state.origin is None else asdict(state.origin),
    }


def from_json(content: Mapping[str, Any]) -> LearnerState:
    """Ignores fields that a newer release has added: a field that must not be ignored changes the format."""
    values = _known(LearnerState, content)
    assembly = values["assembly"]
    values["assembly"] = AssemblyState(
        floor=assembly["floor"],
        closed=frozenset(assembly["closed"]),
        settled=frozenset(Coordinates(partition=partition, offset=offset) for partition, offset in assembly["settled"]),
        **{name: {int(key): value for key, value in assembly[name].items()} for name in _POSITIONS},
        open={
            int(seq): tuple(Coordinates(partition=partition, offset=offset) for partition, offset in lows)
            for seq, lows in assembly["open"].items()
        },
    )
    values["origin"] = None if values["origin"] is None else Origin(**_known(Origin, values["origin"]))
    values["terms"] = tuple(RewardTerm(**_known(RewardTerm, term)) for term in values["terms"])
    return LearnerState(**values)


def _known(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(cls) if each.name in values}
