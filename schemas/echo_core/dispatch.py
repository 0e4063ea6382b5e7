"""Decides when the next prompt may be issued, and the oldest weights that may generate it."""

from __future__ import annotations

from dataclasses import dataclass

from echo_core.policy import Admission, StalenessPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchState:
    """The state of the run, as the allocator of seqs knows it. `undecided`: training groups issued, and neither trained nor dropped. It is
    not derived from the number of groups ever issued: before a fork each step may have taken another number of groups."""

    version: int
    published: int
    undecided: int


def may_issue(state: DispatchState, policy: StalenessPolicy) -> bool:
    """Whether one more group may be issued: undecided ≤ (lead + p + 1 − v) · groups per step, counting the new one.

    With S = lead = 3 at v = p = 5 and 32 groups a step: 128, for the steps 6 to 9, of which the last trains what is 3 versions old.

    With lead = S: more groups could not be trained within the budget, however fast the workers are. Since p ≥ v − kappa + 1 ≥ v − lead the
    bound always admits the next step's groups, so pace never starves the learner. A smaller lead keeps samples of fast workers younger and
    leaves the rest of the budget for late samples.
    """
    if policy.admission is Admission.FREE:
        return True
    steps = policy.pace_lead + state.published + 1 - state.version
    return state.undecided + 1 <= steps * policy.groups_per_step


def required_version(state: DispatchState, policy: StalenessPolicy) -> int:
    """The oldest weights that may generate the next group.

    `line` is the step that will train it, if the groups ahead are trained in order; weights older than line − S would be too old by then.
    Rounded up to a published version, and never above the newest one, so a worker never waits for weights that do not exist. It counts
    undecided groups instead of using the seq, because dropped groups would let the seq run ahead of the learner.
    """
    line = state.version + state.undecided // policy.groups_per_step
    kappa = policy.publication_period
    oldest = max(0, line - policy.budget)
    return min(state.published, -(-oldest // kappa) * kappa)
