"""One episode: rounds of answers, their effect on the board, and their rewards.

Every text is a legal answer with a defined outcome (`read_answer`), and no answer costs more than the moves that a round allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from echo_tasks.answers import tagged
from echo_tasks.sokoban.board import Move, Room, State, drawn, moved
from echo_tasks.task import Observation, Turn

SEPARATOR = "||"
_BY_NAME = {move.value.lower(): move for move in Move}
# Actions as a well-formed answer has them between its separators.
_AS_WRITTEN = {f"{before}{move}{behind}": move for move in Move for before in ("", " ") for behind in ("", " ")}
# The longest action name, with generous white space; longer text is no action.
_MAX_NAME = 64


class AnswerFault(StrEnum):
    """What is wrong with an answer."""

    FINE = "fine"
    NO_ANSWER = "no_answer"
    """It has no `<answer>…</answer>`: the round is spent, nothing moves."""
    UNKNOWN_ACTION = "unknown_action"
    """A part between the separators is no action: it is skipped, the others are done."""
    TOO_MANY = "too_many"
    """More actions than a round allows: the first ones are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payoff:
    """What a turn earns: `move` for each action done, `on_target` and `off_target` for each box pushed there and away, `solved` once, and
    `malformed` for an answer without its tags or with an unknown action.
    """

    move: float
    on_target: float
    off_target: float
    solved: float
    malformed: float


SHAPED = Payoff(move=-0.1, on_target=1.0, off_target=-1.0, solved=10.0, malformed=-0.1)
"""gym-sokoban's rewards, with RAGEN's penalty for a malformed answer."""
SUCCESS = Payoff(move=0.0, on_target=0.0, off_target=0.0, solved=1.0, malformed=0.0)
"""1 for a solved board: the mean return is ECHO's success rate."""


def read_answer(text: str, limit: int) -> tuple[list[Move], AnswerFault]:
    """The first `limit` actions of the last `<answer>…</answer>` in `text`, upper or lower case, and what is wrong with it. Parsing stops
    after `limit` actions.
    """
    content = tagged(text)
    if content is None:
        return [], AnswerFault.NO_ANSWER
    names = content.split(SEPARATOR, limit)
    verdict = AnswerFault.FINE
    if len(names) > limit:
        verdict = AnswerFault.TOO_MANY
        names.pop()
    moves = []
    for name in names:
        move = _AS_WRITTEN.get(name)
        if move is None and len(name) <= _MAX_NAME:
            move = _BY_NAME.get(name.strip().lower())
        if move is None:
            verdict = AnswerFault.UNKNOWN_ACTION
        else:
            moves.append(move)
    return moves, verdict


class SokobanEpisode:
    """At most `rounds` answers of at most `actions_per_round` actions. `show(round, board)`: the observation before each later round."""

    def __init__(
        self, room: Room, state: State, *, rounds: int, actions_per_round: int, payoff: Payoff, show: Callable[[int, str], str]
    ) -> None:
        self._room = room
        self._state = state
        self._rounds = rounds
        self._actions_per_round = actions_per_round
        self._payoff = payoff
        self._show = show
        self._deltas = room.deltas()
        self._round = 0
        self.is_solved = room.is_solved(state)
        """Whether every box is on a target."""

    def reset(self) -> Observation:
        """Empty: the prompt shows the board."""
        return Observation(text="")

    def step(self, action: str) -> Turn:
        """Do what the answer says. Moves into walls are spent; once the board is solved nothing more is done."""
        room, payoff, state = self._room, self._payoff, self._state
        moves, verdict = read_answer(action, self._actions_per_round)
        reward = payoff.malformed if verdict in (AnswerFault.NO_ANSWER, AnswerFault.UNKNOWN_ACTION) else 0.0
        done = 0
        for move in moves:
            if self.is_solved:
                break
            done += 1
            before = state[1]
            state = moved(room, state, self._deltas[move])
            reward += payoff.move
            if state[1] != before:
                gained = (state[1] & room.targets).bit_count() - (before & room.targets).bit_count()
                reward += payoff.on_target if gained > 0 else payoff.off_target if gained < 0 else 0.0
                if room.is_solved(state):
                    self.is_solved = True
                    reward += payoff.solved
        self._state = state
        self._round += 1
        is_over = self.is_solved or self._round >= self._rounds
        return Turn(
            observation="" if is_over else self._show(self._round + 1, drawn(room, state)),
            reward=reward,
            done=is_over,
            info={"solved": self.is_solved, "verdict": verdict.value, "num_actions": done},
        )
