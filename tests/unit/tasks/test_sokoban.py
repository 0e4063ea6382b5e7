"""Boards that can be solved, moves that follow the rules, and every answer with an outcome."""

from __future__ import annotations

import json
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_schemas.errors import UserError
from echo_tasks.catalogue import load_task
from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import Move, Room, State, drawn, moved, read_board
from echo_tasks.sokoban.episode import SHAPED, SUCCESS, AnswerFault, read_answer
from echo_tasks.sokoban.generator import Recipe, make_level, search_back, solution
from tests.thorough import examples

BOARD = "\n".join(["######", "#P_X_#", "#__XO#", "#___O#", "#____#", "######"])
STEPS = {Move.UP: (-1, 0), Move.DOWN: (1, 0), Move.LEFT: (0, -1), Move.RIGHT: (0, 1)}


def walked(text: str, move: Move) -> str:
    """The rules once more, on symbols and coordinates: what the bits must agree with."""
    rows = [list(row) for row in text.split("\n")]
    ((r, c),) = [(r, c) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol in "PS"]
    dr, dc = STEPS[move]
    ahead, behind = rows[r + dr][c + dc], None
    if ahead == "#":
        return text
    if ahead in "X√":
        behind = rows[r + 2 * dr][c + 2 * dc]
        if behind not in "_O":
            return text
        rows[r + 2 * dr][c + 2 * dc] = "X" if behind == "_" else "√"
    rows[r + dr][c + dc] = "S" if ahead in "O√" else "P"
    rows[r][c] = "O" if rows[r][c] == "S" else "_"
    return "\n".join("".join(row) for row in rows)


def fewest_moves(text: str) -> int | None:
    """A solver that plays forwards on the drawn boards; None where no play solves it."""
    queue, seen = deque([(text, 0)]), {text}
    while queue:
        board, count = queue.popleft()
        if "X" not in board:
            return count
        for move in Move:
            following = walked(board, move)
            if following not in seen:
                seen.add(following)
                queue.append((following, count + 1))
    return None


def level_text(task: Sokoban, seed: int, seq: int) -> str:
    return str(task.prompt(seed, seq).entry["board"])


recipes = st.builds(
    lambda size, floor, most: Recipe(width=size[0], height=size[1], boxes=size[2], min_moves=1, max_moves=most, floor=floor),
    size=st.sampled_from([(4, 5, 1), (5, 5, 1), (6, 5, 1), (5, 5, 2)]),
    floor=st.sampled_from([(0.6, 0.9), (1.0, 1.0), (0.7, 0.8)]),
    most=st.integers(8, 20),
)


@settings(max_examples=examples(10))
@given(recipe=recipes, seed=st.integers(0, 2**32))
def test_every_board_is_solved_by_its_solution_and_by_no_shorter_one(recipe: Recipe, seed: int) -> None:
    level = make_level(random.Random(seed), recipe)
    state = level.state
    assert not state[1] & level.room.targets, "no box starts on a target"
    for move in level.solution:
        assert not level.room.is_solved(state)
        state = moved(level.room, state, level.room.deltas()[move])
    assert level.room.is_solved(state)
    assert recipe.min_moves <= len(level.solution) <= recipe.max_moves
    assert fewest_moves(drawn(level.room, level.state)) == len(level.solution)


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 10_000), path=st.lists(st.sampled_from(list(Move)), max_size=40))
def test_moves_are_those_of_the_rules(seed: int, path: list[Move]) -> None:
    level = make_level(random.Random(seed), Sokoban().recipe)
    state, text = level.state, drawn(level.room, level.state)
    for move in path:
        state, text = moved(level.room, state, level.room.deltas()[move]), walked(text, move)
        assert drawn(level.room, state) == text
        assert read_board(text) == (level.room, state)


def test_backward_search_knows_exactly_the_states_that_can_be_solved() -> None:
    room, _ = read_board("\n".join(["#####", "#P_O#", "#_X_#", "#__##", "#####"]))
    plan = search_back(room, max_moves=100)
    floor = [cell for cell in range(25) if not room.walls >> cell & 1]
    states: list[State] = [(player, 1 << box) for player in floor for box in floor if player != box]
    for state in states:
        assert (plan[state][0] if state in plan else None) == fewest_moves(drawn(room, state))
        if state in plan:
            assert len(list(solution(plan, state))) == plan[state][0]


def test_search_is_bounded_where_states_are_millions() -> None:
    inner = [20 * row + column for row in range(1, 19) for column in range(1, 19)]
    walls = ((1 << 400) - 1) ^ sum(1 << cell for cell in inner)
    room = Room(width=20, height=20, walls=walls, targets=sum(1 << cell for cell in inner[100:106]))
    assert len(search_back(room, max_moves=50)) < 60_000


def test_boards_are_a_function_of_seed_and_seq() -> None:
    first, again = Sokoban(), Sokoban()
    boards = [level_text(first, seed, seq) for seed in (0, 1) for seq in range(40)]
    assert boards == [level_text(again, seed, seq) for seed in (0, 1) for seq in range(40)]
    assert len(set(boards)) > 75, "other seeds and seqs are other boards"
    # The same on every machine and under every version of Python: a board that changes is another task.
    assert level_text(first, 0, 0).split("\n") == ["######", "#_XO##", "#P__##", "#_#_##", "#_X_O#", "######"]
    assert level_text(first, 7, 2**40)


def test_the_defaults_are_echos_configuration() -> None:
    task = load_task("sokoban", {})
    assert isinstance(task, Sokoban)
    recipe = task.recipe
    assert (recipe.width, recipe.height, recipe.boxes, recipe.max_moves) == (6, 6, 2, 20)
    assert (task.rounds, task.actions_per_round) == (4, 25)
    (message,) = task.prompt(0, 0).messages
    assert "<answer>Right || Right || Up</answer>" in message.content
    assert message.content.endswith(f"Turn 1 of 4:\n{level_text(task, 0, 0)}")
    assert level_text(task, 0, 0).count("X") == 2
    json.dumps(task.prompt(0, 0).entry)


def test_small_boards_for_a_tiny_model() -> None:
    task = load_task("sokoban", {"size": [5, 5], "boxes": 1, "moves": [1, 6], "rounds": 2, "style": "board", "reward": "success"})
    prompt = task.prompt(0, 3)
    assert prompt.text == "".join(row[1:4] + "\n" for row in prompt.entry["board"].split("\n")[1:4])
    assert fewest_moves(prompt.entry["board"]) == prompt.entry["moves"] <= 6
    episode = task.environment(prompt.entry)
    assert episode is not None
    turn = episode.step("<answer>Up</answer>")
    assert [len(row) for row in turn.observation.split("\n")] == [3, 3, 3, 0]


@pytest.mark.parametrize(
    ("text", "moves", "verdict"),
    [
        ("<answer>Right || Up</answer>", "Right Up", AnswerFault.FINE),
        ("I push it.\n<answer> down||LEFT </answer> Done.", "Down Left", AnswerFault.FINE),
        ("", "", AnswerFault.NO_ANSWER),
        ("Right || Up", "", AnswerFault.NO_ANSWER),
        ("<answer>Right", "", AnswerFault.NO_ANSWER),
        ("Right</answer>", "", AnswerFault.NO_ANSWER),
        ("</answer>Up<answer>", "", AnswerFault.NO_ANSWER),
        ("<Answer>Up</Answer>", "", AnswerFault.NO_ANSWER),
        ("<answer></answer>", "", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up, Down</answer>", "", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up || Jump || Down</answer>", "Up Down", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up | Down</answer>", "", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up ||</answer>", "Up", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up</answer> no: <answer>Down</answer>", "Down", AnswerFault.FINE),
        ("<answer>Up</answer> and <answer>Down", "Up", AnswerFault.FINE),
        ("<answer><answer>Up</answer></answer>", "Up", AnswerFault.FINE),
        ("<answer>Left<answer>Up</answer>", "Up", AnswerFault.FINE),
        ("<answer>Ｕｐ || ↑ || Up\u200b || 上</answer>", "", AnswerFault.UNKNOWN_ACTION),
        ("<answer>Up\u00a0||\u2003Down\t||\nLeft</answer>", "Up Down Left", AnswerFault.FINE),
        ("<answer>Up\0</answer>", "", AnswerFault.UNKNOWN_ACTION),
        ("<answer>" + "Up || " * 24 + "Up</answer>", " ".join(["Up"] * 25), AnswerFault.FINE),
        ("<answer>" + "Up || " * 25 + "Up</answer>", " ".join(["Up"] * 25), AnswerFault.TOO_MANY),
        ("<answer>" + "Up || " * 5_000 + "Jump</answer>", " ".join(["Up"] * 25), AnswerFault.TOO_MANY),
        ("<answer>Up" + " " * 100_000 + "|| Down</answer>", "Down", AnswerFault.UNKNOWN_ACTION),
        ("<answer>" * 50_000 + "Up" + "</answer>" * 50_000, "Up", AnswerFault.FINE),
    ],
)
def test_every_text_is_an_answer_with_an_outcome(text: str, moves: str, verdict: AnswerFault) -> None:
    found, why = read_answer(text, 25)
    assert (" ".join(found), why) == (moves, verdict)


@settings(max_examples=examples(50))
@given(text=st.text() | st.lists(st.sampled_from(["<answer>", "</answer>", "Up", "||", "x", "\n"])).map("".join))
def test_no_text_breaks_an_episode(text: str) -> None:
    task = Sokoban()
    episode = task.environment({"board": BOARD})
    turns = [episode.step(text) for _ in range(4)]
    assert turns[-1].done
    assert all(isinstance(turn.reward, float) for turn in turns)


def test_turns_earn_what_they_did() -> None:
    board = "\n".join(["#######", "#PX_O_#", "#OX___#", "#_____#", "#######"])
    episode = Sokoban().environment({"board": board})
    assert episode.reset().text == ""
    first = episode.step("<answer>Right || Up || Right</answer>")
    # Three actions, one of them into a wall, and a box onto its target.
    assert first.reward == pytest.approx(3 * SHAPED.move + SHAPED.on_target)
    assert (first.done, first.info["num_actions"], first.info["solved"]) == (False, 3, False)
    assert first.observation.split("\n") == ["Turn 2 of 4:", "#######", "#__P√_#", "#OX___#", "#_____#", "#######"]
    away = episode.step("<answer>Right</answer>")
    assert away.reward == pytest.approx(SHAPED.move + SHAPED.off_target)
    nothing = episode.step("I give up.")
    assert (nothing.reward, nothing.info["verdict"]) == (SHAPED.malformed, AnswerFault.NO_ANSWER)
    assert nothing.observation.startswith("Turn 4 of 4:")
    last = episode.step("<answer>Fly || Left</answer>")
    assert last.reward == pytest.approx(SHAPED.malformed + SHAPED.move)
    assert (last.done, last.observation, last.info["solved"]) == (True, "", False)


@pytest.mark.parametrize(("reward", "wanted"), [("success", 1.0), ("shaped", SHAPED.solved + 2 * SHAPED.on_target)])
def test_a_solved_board_ends_the_episode_and_the_rest_of_the_answer_is_not_done(reward: str, wanted: float) -> None:
    task = Sokoban(reward=reward)
    level = task.level(0, 5)
    episode = task.environment(task.prompt(0, 5).entry)
    answer = " || ".join([*level.solution, *["Up"] * (25 - len(level.solution))])
    turn = episode.step(f"<answer>{answer}</answer>")
    assert (turn.done, turn.info["solved"], turn.info["num_actions"]) == (True, True, len(level.solution))
    cost = 0.0 if reward == "success" else SHAPED.move * len(level.solution)
    # What a box earns on a target that it leaves again, it loses there.
    assert turn.reward == pytest.approx(wanted + cost)


def test_success_pays_for_nothing_else() -> None:
    episode = Sokoban(reward="success", rounds=2).environment({"board": BOARD})
    assert [episode.step("<answer>Right || Right</answer>").reward, episode.step("nonsense").reward] == [0.0, 0.0]
    assert SUCCESS.solved == 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"size": [3, 6]}, r"size = 3 is no whole number from 4 to 20"),
        ({"size": [6, 99]}, r"size = 99 is no whole number from 4 to 20"),
        ({"size": "66"}, r"size = '66' is not two numbers.*size = \[a, b\]"),
        ({"size": [6]}, r"is not two numbers"),
        ({"size": [6.5, 6]}, r"size = 6.5 is no whole number"),
        ({"boxes": 0}, r"boxes = 0 is no whole number of at least 1"),
        ({"boxes": True}, r"boxes = True is no whole number"),
        ({"size": [4, 4], "boxes": 2}, r"2 boxes do not fit on a Sokoban board of 4×4.*takes 1 to 1"),
        ({"moves": [9, 8]}, r"moves = 9 is no whole number from 1 to 8"),
        ({"floor": [0.9, 0.5]}, r"floor = \[0.9, 0.5\] is no range"),
        ({"floor": [0, 1]}, r"is no range of shares"),
        ({"rounds": 0}, r"rounds = 0 is no whole number"),
        ({"actions_per_round": "many"}, r"actions_per_round = 'many' is no whole number"),
        ({"reward": "sucess"}, r"reward = 'sucess' is none of its values.*Did you mean 'success'"),
        ({"style": "chatty"}, r"Did you mean 'chat'"),
        (
            {"size": [4, 4], "boxes": 1, "moves": [15, 20]},
            r"No Sokoban board of 4×4 with 1 boxes has a shortest solution of 15 to 20 moves",
        ),
        ({"colour": "red"}, r"cannot be made with the options \['colour'\]"),
    ],
)
def test_options_that_make_no_board(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task("sokoban", options)


@pytest.mark.parametrize(
    ("board", "sentence"),
    [
        ("", "three rows"),
        ("###\n#P\n###", "same length"),
        (BOARD.replace("P", "?"), "no symbol '\\?'"),
        (BOARD.replace("P", "_"), "one player, not 0"),
        (BOARD.replace("O", "P"), "one player, not 3"),
        (BOARD.replace("O", "_"), "no more boxes than targets"),
        (BOARD.replace("X", "_"), "at least one box"),
        (BOARD.replace("######", "##_###", 1), "closed by walls"),
        (BOARD.replace("#__XO#", "#__XO_"), "closed by walls"),
    ],
)
def test_an_entry_that_is_no_board(board: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sokoban().environment({"board": board})
