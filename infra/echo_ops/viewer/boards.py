"""The boards of a Sokoban episode, played again from its entry and its answers: the log holds both. Pure."""

from __future__ import annotations

import json
from typing import Any

from echo_ops.cli.painting import Pieces, passages_of
from echo_ops.viewer.windows import Json
from echo_schemas.records import Trajectory
from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import drawn, moved, read_board
from echo_tasks.sokoban.episode import read_answer

_MOST_FRAMES = 400
_DEFAULT_ACTIONS = 25


def boards_of(trajectory: Trajectory, pieces: Pieces | None, config: str) -> list[Json]:
    """The board before the first move and after each one; empty for another task, or where nothing can be read.

    `config`: the run's settings as JSON, for how many actions a round allows. An episode of several rounds needs the tokenizer, since its
    texts stand one behind the other.
    """
    if trajectory.task != Sokoban.name:
        return []
    try:
        room, state = read_board(str(_parsed(trajectory.entry)["board"]))
    except (KeyError, ValueError):
        return []
    frames = [{"turn": 0, "move": "", "board": drawn(room, state)}]
    limit, deltas = _actions_per_round(config), room.deltas()
    for number, text in enumerate(_answers(trajectory, pieces), start=1):
        moves, verdict = read_answer(text, limit)
        if not moves:
            frames.append({"turn": number, "move": verdict.value, "board": drawn(room, state)})
        for move in moves:
            if room.is_solved(state) or len(frames) == _MOST_FRAMES:
                return frames
            state = moved(room, state, deltas[move])
            frames.append({"turn": number, "move": move.value, "board": drawn(room, state)})
    return frames


def _answers(trajectory: Trajectory, pieces: Pieces | None) -> list[str]:
    generated = [turn for turn in passages_of(trajectory) if turn.is_generated]
    if len(generated) == 1:
        return [trajectory.completion]
    if pieces is None:
        return []
    ids = trajectory.tokens.tolist()
    return ["".join(pieces(ids[turn.start : turn.end])) for turn in generated]


def _actions_per_round(config: str) -> int:
    task = _parsed(config).get("task", {})
    options = task.get("options", {}) if isinstance(task, dict) else {}
    actions = options.get("actions_per_round", _DEFAULT_ACTIONS) if isinstance(options, dict) else None
    return actions if isinstance(actions, int) and actions > 0 else _DEFAULT_ACTIONS


def _parsed(text: str) -> dict[str, Any]:
    """Raises ValueError for what is no JSON."""
    found = json.loads(text)
    return found if isinstance(found, dict) else {}
