"""Search of a text or a row of tokens in trajectories. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import regex

from echo_schemas.columns import TOKEN_BYTES, pack_tokens
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.records import Trajectory

# Token ids are int32.
_MOST_TOKEN = (1 << 31) - 1
# An expression can take for ever on one text, and nothing else in the process goes on meanwhile.
_MOST_S = 1.0


@dataclass(frozen=True, slots=True)
class Hit:
    """A found place: characters [start, end) of `text`, or (`where` is `tokens`) positions of `token_ids`."""

    where: str
    text: str
    start: int
    end: int


class TextMatcher:
    """Searches a regular expression in the prompt, the completion or both."""

    def __init__(self, pattern: str, *, ignore_case: bool = False, within: Sequence[str] = ("prompt", "completion")) -> None:
        """Raises UserError for a broken expression."""
        try:
            self._pattern = regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
        except regex.error as exc:
            at = "" if exc.pos is None else f" at character {exc.pos + 1}"
            raise UserError(
                f"The regular expression {pattern!r} is broken{at}: {exc.msg}.",
                hint="Put a backslash before ( [ { . * + ? to search for one.",
            ) from exc
        except RecursionError:
            raise UserError("The regular expression is nested too deeply.", hint="Write it with fewer brackets.") from None
        self._within = tuple(within)

    def find(self, trajectory: Trajectory) -> Hit | None:
        """The first place, prompt before completion. Raises UserError if the expression takes too long."""
        for name in self._within:
            text = trajectory.prompt if name == "prompt" else trajectory.completion
            try:
                match = self._pattern.search(text, timeout=_MOST_S)
            except TimeoutError:
                raise UserError(
                    f"The regular expression {self._pattern.pattern!r} took longer than {_MOST_S:g} s on one text.",
                    hint="Write it without repetitions of what repeats: a+ in place of (a+)+ or (a|aa)+.",
                ) from None
            if match is not None:
                return Hit(name, text, match.start(), match.end())
        return None


class TokenMatcher:
    """Searches consecutive token ids anywhere in the episode."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._wanted = pack_tokens(tokens)

    def find(self, trajectory: Trajectory) -> Hit | None:
        """The first place."""
        at = trajectory.token_ids.find(self._wanted)
        while at >= 0 and at % TOKEN_BYTES:
            # A match across the border of two numbers is chance.
            at = trajectory.token_ids.find(self._wanted, at + 1)
        if at < 0:
            return None
        return Hit("tokens", "", at // TOKEN_BYTES, (at + len(self._wanted)) // TOKEN_BYTES)


def parse_tokens(text: str) -> list[int]:
    """`17,4,9`. Raises UserError."""
    words = [word.strip() for word in text.split(",")]
    numbers = [number_of(word) for word in words]
    found = [number for number in numbers if number is not None and number <= _MOST_TOKEN]
    if len(found) < len(words):
        raise UserError(f"--tokens {text!r} is no list of token ids.", hint="Write 17,4,9.")
    return found
