"""The settings that all rules of one run share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from echo_schemas.errors import UserError


class Admission(StrEnum):
    """The rule for issuing prompts."""

    FREE = "free"
    PACE = "pace"


class OverBudget(StrEnum):
    """The rule for a sample that is older than the budget."""

    DROP = "drop"
    WITHHOLD = "withhold"
    DOWNWEIGHT = "downweight"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """S, kappa and related settings (ECHO-2 §4.2). Raises UserError for a combination under which a run would starve."""

    budget: int
    """S: largest staleness that is trained."""
    publication_period: int
    """kappa: a snapshot is published when version % kappa == 0."""
    groups_per_step: int
    group_size: int
    min_group_size: int = 2
    admission: Admission = Admission.PACE
    over_budget: OverBudget = OverBudget.DROP
    lead: int | None = None
    """Under pace: groups may be under way for so many steps beyond the first step of the newest published weights; None: the budget."""

    def __post_init__(self) -> None:
        if min(self.budget, self.publication_period - 1, self.groups_per_step - 1, self.group_size - 1, self.min_group_size - 1) < 0:
            raise UserError("budget must not be negative, and period, groups and sizes must be at least 1.")
        if self.publication_period > self.budget + 1:
            raise UserError(
                f"A publication period of {self.publication_period} is above budget + 1 = {self.budget + 1}: before each publication every "
                f"sample would be too old.",
                hint=f"Use publication_period = {self.budget + 1} or budget = {self.publication_period - 1}.",
            )
        if not self.publication_period - 1 <= self.pace_lead <= self.budget:
            raise UserError(
                f"A lead of {self.pace_lead} steps does not lie between publication period - 1 = {self.publication_period - 1}, below "
                f"which the learner would starve before each publication, and the budget {self.budget}.",
                hint="Leave lead out, or choose one between the two.",
            )

    @property
    def pace_lead(self) -> int:
        """The lead in force."""
        return self.budget if self.lead is None else self.lead

    @property
    def max_open_groups(self) -> int:
        """Limit of groups under assembly: four times the undecided groups that pace allows, so that only a fault reaches it."""
        return 4 * (self.budget + self.publication_period + 1) * self.groups_per_step

    def may_be_issued(self, seq: int, num_closed: int) -> bool:
        """Under pace: whether `seq` may have been issued when the learner has closed `num_closed` seqs.

        Seqs are dense, so seq − num_closed issued ones below it are open, and pace allows (lead + 1) · groups per step. The budget is used
        for the lead, which may have been larger before a restart; one step is added for groups being closed at this moment, and a
        publication period for the steps that a killed learner repeats from its checkpoint.
        """
        return seq < num_closed + (self.budget + self.publication_period + 2) * self.groups_per_step
