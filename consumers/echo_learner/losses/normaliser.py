"""What the sum over the tokens of one optimizer update is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Normalisation(StrEnum):
    """How tokens are averaged.

    SEQUENCE  mean over each sequence's tokens, then over sequences (ECHO-2 eq. 25; every answer counts the same)
    TOKEN     sum over tokens / number of tokens (DAPO, arXiv 2503.14476; every token counts the same)
    CONSTANT  sum over tokens / (sequences · constant) (Dr. GRPO, arXiv 2503.20783; constant = longest answer allowed)
    """

    SEQUENCE = "sequence"
    TOKEN = "token"  # noqa: S105 - a unit of text, not a secret
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Normaliser:
    """The divisor of one update. Counts are of the whole update, over all micro-batches and ranks, before any filter.

    Because every micro-batch divides by the same counts, the gradients of the micro-batches add up to the gradient of
    the update.
    """

    mode: Normalisation
    num_sequences: int
    num_tokens: int
    constant: float | None = None

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or self.num_tokens < 1:
            raise ValueError(f"An update of {self.num_sequences} sequences and {self.num_tokens} tokens has nothing to train on.")
        if self.mode is Normalisation.CONSTANT and not (self.constant is not None and self.constant > 0):
            raise ValueError(f"Normalisation 'constant' needs a constant above zero, not {self.constant}.")

    def scales(self, sequence_lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Factor of every token of each sequence, [N], from the unfiltered lengths [N]."""
        lengths = sequence_lengths.to(dtype)
        match self.mode:
            case Normalisation.SEQUENCE:
                return 1.0 / (lengths.clamp(min=1) * self.num_sequences)
            case Normalisation.TOKEN:
                return lengths.new_full(lengths.shape, 1.0 / self.num_tokens)
            case Normalisation.CONSTANT:
                return lengths.new_full(lengths.shape, 1.0 / (self.num_sequences * (self.constant or 1.0)))
