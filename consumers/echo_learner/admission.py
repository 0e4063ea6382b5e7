"""Which trajectories the model can take."""

from __future__ import annotations

from dataclasses import dataclass

from echo_schemas.records import DropReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The model's bounds on a trajectory. `vocabulary`: token ids are below it; `max_length`: tokens of prompt and answer; `experts`:
    layers, experts a token and experts in all, if routing is replayed."""

    vocabulary: int
    max_length: int
    experts: tuple[int, int, int] | None = None

    def fault_of(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        """Why the model cannot take the trajectory, if so."""
        tokens = trajectory.tokens
        if len(tokens) > self.max_length:
            return DropReason.OVERSIZED, f"A sample has {len(tokens)} tokens, above {self.max_length}."
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary:
            return DropReason.MALFORMED, f"A sample has a token outside the vocabulary of {self.vocabulary}."
        if trajectory.generated[0].start == 0:
            return DropReason.MALFORMED, "A sample was generated from its first token on: there is no token before it to predict it from."
        return self._fault_of_experts(trajectory)

    def _fault_of_experts(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        routing = trajectory.experts
        if routing is None:
            return None
        if self.experts is None:
            return DropReason.MALFORMED, "A sample says which experts its tokens went to, and [policy] replay_experts is false."
        layers, per_token, num_experts = self.experts
        if (routing.layers, routing.per_token) != (layers, per_token) or int(routing.table(len(trajectory.tokens)).max()) >= num_experts:
            return (
                DropReason.MALFORMED,
                f"A sample's experts are not {per_token} of {num_experts} in {layers} layers, as the model has them.",
            )
        return None
