"""Episodes as pictures: Sokoban boards, poker tables, and drawings by a user's own function. The log holds entry and answers; the episode
is played again from them.

A drawing is a list of frames, each with a label and one of

    board   rows of Sokoban's symbols
    table   cards, pot and stacks at a poker table
    text    lines of text

    # my_drawing.py, for `echoswarm view --draw my-task=my_drawing.py:frames`
    def frames(entry, answers):
        return [("the grid", entry["grid"]), *((f"answer {n}", answer) for n, answer in enumerate(answers, 1))]
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from echo_ops.harmless import harmless
from echo_ops.painting import Pieces, passages_of
from echo_ops.viewer.windows import Json
from echo_schemas.entry import parse_entry
from echo_schemas.errors import UserError
from echo_schemas.records import Trajectory
from echo_tasks.catalogue import import_object, load_task
from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import drawn, moved, read_board
from echo_tasks.sokoban.episode import read_answer

logger = logging.getLogger(__name__)

Draw = Callable[[Mapping[str, Any], Sequence[str]], Iterable[tuple[str, str]]]
"""Takes a prompt's entry and the answers of its episode; returns a label and a text for each frame."""
_MOST_FRAMES, _MOST_TEXT = 400, 4_000
_DEFAULT_ACTIONS = 25
_POKER = ("poker", "kuhn-poker")


class Drawings:
    def __init__(self, own: Mapping[str, Draw] | None = None) -> None:
        """`own`: task → a user's function."""
        self._own = own or {}

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Drawings:
        """From `my-task=my_drawing.py:frames`. Raises UserError."""
        own: dict[str, Draw] = {}
        for text in texts:
            task, sign, path = text.partition("=")
            if not sign or not task or not path:
                raise UserError(f"--draw {text!r} names no task and function.", hint="Write --draw my-task=my_drawing.py:frames.")
            found = import_object(path)
            if not callable(found):
                raise UserError(f"{path} is no function.", hint="It takes an entry and answers and gives pairs of a label and a text.")
            own[task] = found
        return cls(own)

    def of(self, trajectory: Trajectory, pieces: Pieces | None, config: str) -> list[Json]:
        """The frames; empty for a task without drawings, or if the entry cannot be read.

        `config`: the run's settings as JSON, for the task's options. An episode of several turns needs the tokenizer, because the log
        holds its answers as one text.
        """
        try:
            entry = parse_entry(trajectory.entry)
        except ValueError:
            return []
        answers = _answers(trajectory, pieces)
        if (draw := self._own.get(trajectory.task)) is not None:
            return _drawn_by_user(draw, entry, answers)
        if trajectory.task == Sokoban.name:
            return _boards(entry, answers, _options(config))
        if trajectory.task in _POKER:
            return _tables(trajectory.task, entry, answers, _options(config))
        return []


def _boards(entry: Mapping[str, Any], answers: Sequence[str], options: Mapping[str, Any]) -> list[Json]:
    """The board before the first move and after each one."""
    try:
        room, state = read_board(str(entry["board"]))
    except (KeyError, ValueError):
        return []
    frames: list[Json] = [{"label": "at the beginning", "board": drawn(room, state)}]
    actions = options.get("actions_per_round")
    limit = actions if isinstance(actions, int) and actions > 0 else _DEFAULT_ACTIONS
    deltas = room.deltas()
    for number, text in enumerate(answers, start=1):
        moves, verdict = read_answer(text, limit)
        if not moves:
            frames.append({"label": f"{len(frames)}. {verdict.value} (answer {number})", "board": drawn(room, state)})
        for move in moves:
            if room.is_solved(state) or len(frames) == _MOST_FRAMES:
                return frames
            state = moved(room, state, deltas[move])
            frames.append({"label": f"{len(frames)}. {move.value} (answer {number})", "board": drawn(room, state)})
    return frames


def _tables(task: str, entry: Mapping[str, Any], answers: Sequence[str], options: Mapping[str, Any]) -> list[Json]:
    """The table before each answer and at the end, with the action and the reward."""
    try:
        environment: Any = load_task(task, options).environment(entry)
        frames = [{"label": "the deal", "table": environment.table().plain()}]
        for number, answer in enumerate(answers[:_MOST_FRAMES], start=1):
            turn = environment.step(answer)
            label = f"answer {number}: {turn.info['action']}, {turn.reward:+g}"
            frames.append({"label": label, "table": environment.table().plain()})
            if turn.done:
                break
    except (UserError, ValueError, KeyError, TypeError, IndexError, ModuleNotFoundError):
        # Options or entry of another release, or no OpenSpiel on this machine: the page shows the texts only.
        return []
    return frames


def _drawn_by_user(draw: Draw, entry: Mapping[str, Any], answers: Sequence[str]) -> list[Json]:
    frames: list[Json] = []
    try:
        for label, text in draw(entry, answers):
            frames.append({"label": harmless(str(label)), "text": harmless(str(text)[:_MOST_TEXT], keep_lines=True)})
            if len(frames) == _MOST_FRAMES:
                break
    except Exception as exc:  # a user's function may raise anything; the page shows the error and all else
        logger.exception("A drawing failed")
        frames.append({"label": "the drawing failed", "text": harmless(f"{type(exc).__name__}: {exc}")})
    return frames


def _answers(trajectory: Trajectory, pieces: Pieces | None) -> list[str]:
    generated = [turn for turn in passages_of(trajectory) if turn.is_generated]
    if len(generated) == 1:
        return [trajectory.completion]
    if pieces is None:
        return []
    ids = trajectory.tokens.tolist()
    return ["".join(pieces(ids[turn.start : turn.end])) for turn in generated]


def _options(config: str) -> Mapping[str, Any]:
    try:
        task = json.loads(config).get("task", {})
    except (ValueError, AttributeError):
        return {}
    options = task.get("options", {}) if isinstance(task, dict) else {}
    return options if isinstance(options, dict) else {}
