"""The weighted rewards that a run is trained on, and changes of a weight. Pure.

in force   exact = 1
ordered    my_rewards.py:brevity = 0.2, and its groups wait for it
then       exact = 1, my_rewards.py:brevity = 0.2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from echo_schemas.errors import UserError
from echo_schemas.records import RewardControl, RewardTerm

WAIT, WITHOUT = "wait", "without"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What happens to a sample whose reward is missing: it waits for `deadline_s`, and is then dropped, or gets `default` if that is set.
    Not `required`: it does not wait, and the reward counts 0.
    """

    required: bool = True
    default: float | None = None
    deadline_s: float | None = None


def parse_missing(text: str, deadline_s: float) -> Missing:
    """`wait`, `without`, or the value to take after `deadline_s`. Raises UserError."""
    if text == WAIT:
        return Missing(deadline_s=deadline_s)
    if text == WITHOUT:
        return Missing(required=False, deadline_s=deadline_s)
    return Missing(default=_number(text, f"--missing {text} is neither {WAIT}, {WITHOUT} nor a number."), deadline_s=deadline_s)


def parse_weight(text: str) -> tuple[str, float]:
    """`brevity=0.2` as a name and a weight. Raises UserError."""
    name, sign, value = text.rpartition("=")
    if not sign or not name:
        raise UserError(f"{text!r} is no weight.", hint="Write a name and a number, such as brevity=0.2.")
    return name.strip(), _number(value, f"The weight of {name!r} must be a finite number; it is {value!r}.")


def _number(text: str, complaint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(complaint) from None
    if not math.isfinite(value):
        raise UserError(complaint)
    return value


def full_name(asked: str, known: Collection[str]) -> str:
    """The whole name of a reward, given whole or by the part behind its colon. Raises UserError for an unknown or ambiguous name."""
    if asked in known:
        return asked
    found = sorted(name for name in known if name.rpartition(":")[2] == asked)
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{asked!r} may be {', '.join(found)}.", hint="Write the whole name.")
    raise UserError(
        f"No application scores {asked!r}: no recent record of it is on the topic `rewards`.",
        hint=f"Known: {', '.join(sorted(known)) or 'none'}. `echoswarm reward attach` begins to score another one.",
    )


def terms_in_force(reported: Sequence[RewardTerm], order: RewardControl | None, version: int) -> tuple[RewardTerm, ...]:
    """The terms of the next batch: those of the newest order, if it is in force at learner `version`, else those of the newest step."""
    if order is not None and order.from_version <= version + 1:
        return order.terms
    return tuple(reported)


def with_weight(
    terms: Sequence[RewardTerm], name: str, weight: float, missing: Missing | None, deadline_s: float
) -> tuple[RewardTerm, ...]:
    """`terms` with another weight of `name`. `missing` None: the policy stays; a new reward is waited for during `deadline_s`.

    Raises UserError if nothing would be left to train on.
    """
    known = {term.name: term for term in terms}
    policy = missing or (None if name in known else Missing(deadline_s=deadline_s))
    changed = replace(known.get(name, RewardTerm(name=name, weight=weight)), weight=weight)
    if policy is not None:
        changed = replace(changed, required=policy.required, default=policy.default, deadline_s=policy.deadline_s)
    found = tuple({**known, name: changed}.values())
    if not any(term.weight for term in found):
        raise UserError("Nothing would be left to train on: every weight would be 0.", hint="Give another reward a weight first.")
    return found


def listed(terms: Sequence[RewardTerm]) -> str:
    """`exact = 1, my_rewards.py:brevity = 0.2`."""
    return ", ".join(f"{term.name} = {term.weight:g}" for term in terms) or "none"


def policy_of(term: RewardTerm | None) -> str:
    """What groups do while the reward is missing."""
    if term is None or term.weight == 0:
        return "no group waits"
    if not term.required:
        return "groups go without it"
    limit = "" if term.deadline_s is None else f" {term.deadline_s:g} s"
    return f"groups wait{limit}, then {'their samples are dropped' if term.default is None else f'{term.default:g} stands in'}"
