"""The rewards of a run: their applications, delay and coverage, and a comparison of two on the same samples. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict

import numpy as np

from echo_ops.harmless import harmless
from echo_ops.rewards.comparison import Comparison, compare
from echo_ops.rewards.watch import ScorerLine, plain_line
from echo_ops.viewer.steps import histogram
from echo_ops.viewer.windows import Json, number
from echo_schemas.records import Coordinates, Reward, RewardControl, RewardTerm

# Rows and columns of the two rewards' joint histogram.
_FIELDS = 10
# Most names with a histogram.
_MOST_NAMES = 24


def rewards_page(
    lines: Sequence[ScorerLine],
    recent: Sequence[Reward],
    terms: Sequence[RewardTerm],
    order: RewardControl | None,
    pair: tuple[str, str],
) -> Json:
    """`recent`: the newest rewards; `terms`: of the next step; `order`: of weights for a later one; `pair`: the two names to compare,
    empty: the first two."""
    by_name: dict[str, list[Reward]] = defaultdict(list)
    for reward in recent:
        if reward.value is not None:
            by_name[reward.name].append(reward)
    judged = {reward.of for rewards in by_name.values() for reward in rewards}
    names = sorted(by_name)[:_MOST_NAMES]
    a, b = pair if all(pair) else _first_pair([line.name for line in lines], by_name)
    found = compare(by_name[a], by_name[b]) if a in by_name and b in by_name else None
    return {
        "num_names": len(by_name),
        "terms": [{"name": harmless(term.name), "weight": term.weight} for term in terms],
        "ordered": None
        if order is None
        else {
            "from_version": order.from_version,
            "terms": [{"name": harmless(term.name), "weight": term.weight} for term in order.terms],
        },
        "lines": [_line(line) for line in lines],
        "values": [
            {
                "name": harmless(name),
                **_coverage({reward.of for reward in by_name[name]}, judged),
                "histogram": histogram(np.array([reward.value for reward in by_name[name]], np.float64)),
            }
            for name in names
        ],
        "names": names,
        "comparison": None if found is None else _plain(found) | {"a": a, "b": b, "square": _square(by_name[a], by_name[b])},
        "pair": [a, b],
    }


def _coverage(scored: Set[Coordinates], judged: Set[Coordinates]) -> Json:
    """The share of the judged samples that have one reward, and of how many. Of each partition they count from the first one that has it:
    earlier ones may have it too, in a record that is older than the newest ones that were read."""
    first: dict[int, int] = {}
    for place in scored:
        first[place.partition] = min(first.get(place.partition, place.offset), place.offset)
    num_judged = sum(place.offset >= first.get(place.partition, 0) for place in judged)
    return {"coverage": len(scored) / num_judged, "num_judged": num_judged}


def _line(line: ScorerLine) -> Json:
    plain = plain_line(line)
    return {**plain, "mean": number(line.mean), **{name: harmless(str(plain[name])) for name in ("name", "application", "error")}}


def _first_pair(order: Sequence[str], by_name: Mapping[str, Sequence[Reward]]) -> tuple[str, str]:
    names = [name for name in dict.fromkeys([*order, *sorted(by_name)]) if name in by_name]
    return (names[0], names[1]) if len(names) > 1 else ("", "")


def _plain(found: Comparison) -> Json:
    plain = {name: number(value) if isinstance(value, float) else value for name, value in asdict(found).items()}
    return plain | {"of_a": plain.pop("a"), "of_b": plain.pop("b")}


def _square(first: Sequence[Reward], second: Sequence[Reward]) -> Json:
    """The joint histogram of two rewards: rows by ascending value of b, columns by ascending value of a."""
    values: dict[Coordinates, float] = {}
    for reward in first:
        if reward.value is not None:
            values.setdefault(reward.of, reward.value)
    both: dict[Coordinates, tuple[float, float]] = {}
    for reward in second:
        if reward.value is not None and reward.of in values:
            both.setdefault(reward.of, (values[reward.of], reward.value))
    a, b = (np.array([pair[at] for pair in both.values()], np.float64) for at in (0, 1))
    counts, a_edges, b_edges = np.histogram2d(a, b, bins=_FIELDS)
    return {"counts": counts.T.astype(int).tolist(), "a_edges": a_edges.tolist(), "b_edges": b_edges.tolist()}
