"""No-limit hold'em: hands played by hand, chips conserved whatever is answered, hands repeated, sizes and hostile answers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_schemas.errors import UserError
from echo_tasks.poker import Poker
from echo_tasks.poker.cards import NUM_CARDS, RANKS, SUITS, card_name
from echo_tasks.poker.episode import PENALISED, AnswerKind, HandEpisode, WordedAction, read_answer
from echo_tasks.poker.holdem import meant
from echo_tasks.poker.opponents import CALL, FOLD, OPPONENTS, View, play_randomly, play_tightly
from echo_tasks.task import Turn
from tests.thorough import examples

ACTIONS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["Check", "Call", "Fold", "Raise pot", "raise half-pot", "Bet min", "All-in", "raise 999999999", "Raise 0", "Raise"]),
    st.integers(0, 3000).map(lambda size: f"Raise to {size}"),
)


def cards(names: str) -> list[int]:
    """`Ah Kd` as numbers."""
    return [RANKS.index(name[0]) * len(SUITS) + SUITS.index(name[1]) for name in names.split()]


def heads_up(mine: str, other: str, board: str, opponent: str = "call-station", **options: Any) -> HandEpisode:
    """The policy on the big blind of 20 against the button, which opens, 1000 chips each."""
    entry = {"cards": cards(f"{mine} {other} {board}"), "seat": 0, "opponents": [opponent, opponent], "seed": "a test"}
    return Poker(players=2, **options).environment(entry)


def said(episode: HandEpisode, *actions: str) -> list[Turn]:
    """The turns that these actions make."""
    return [episode.step(f"<answer>{action}</answer>") for action in actions]


DRY = "2c 7d 9h Jc Kd"


def test_the_better_hand_takes_the_pot_and_each_turn_earns_its_change_of_chips() -> None:
    turns = said(heads_up("Ah Ad", "3s 4s", DRY), "check", "bet 50", "raise pot", "check")
    assert [turn.reward for turn in turns] == [-20, -50, -140, 420]
    assert [turn.info["action"] for turn in turns] == ["check", "raise to 50", "raise to 140", "check"]
    assert turns[-1].done
    assert "Board: [2c, 7d, 9h, Jc], Pot: 140, To call: 0" in turns[1].observation


def test_the_worse_hand_pays_and_equal_hands_share() -> None:
    assert sum(turn.reward for turn in said(heads_up("3s 4s", "Ah Ad", DRY), "all-in")) == -1000
    assert sum(turn.reward for turn in said(heads_up("Ah 3d", "As 3c", DRY), "all-in")) == 0


def test_who_folds_loses_what_is_in_and_nothing_more() -> None:
    turns = said(heads_up("3s 4s", "Ah Ad", DRY, opponent="tight"), "call", "check", "fold")
    assert [(turn.reward, turn.done) for turn in turns] == [(-40, False), (0, False), (0, True)]
    assert turns[-1].observation == ""


def test_a_state_tells_cards_pot_stacks_betting_and_what_is_legal() -> None:
    turns = said(heads_up("3s 4s", "Ah Ad", DRY, opponent="tight"), "call", "check")
    assert turns[-1].observation == (
        "Turn 3\n"
        "State: Hand: [3s, 4s], Board: [2c, 7d, 9h], Pot: 120, To call: 40\n"
        "You are seat 1 of 2 (big blind). Stacks: you 960, seat 2 920\n"
        "Betting: preflop seat 2: raise to 40; preflop you: call 20; flop you: check; flop seat 2: raise to 40\n"
        "Legal: Fold, Call 40, Raise 80 to 960\n"
        "Always end with your action in this form: <answer>ACTION</answer>"
    )


@pytest.mark.parametrize(
    ("words", "action", "verdict", "cost"),
    [
        ("<answer>Check</answer>", "fold", AnswerKind.ILLEGAL, 20),
        ("<answer>Raise -5</answer>", "fold", AnswerKind.UNKNOWN_ACTION, 20),
        ("<answer>Raise NaN</answer>", "fold", AnswerKind.UNKNOWN_ACTION, 20),
        ("<answer>Raise 1e9</answer>", "fold", AnswerKind.UNKNOWN_ACTION, 20),
        ("<answer>" + "Raise 9" + "9" * 5000 + "</answer>", "fold", AnswerKind.UNKNOWN_ACTION, 20),
        ("all-in", "fold", AnswerKind.NO_ANSWER, 20),
        ("<answer>Raise 1</answer>", "raise to", AnswerKind.ADJUSTED, 0),
        ("<answer>Raise 5000</answer>", "raise to 1000", AnswerKind.ADJUSTED, 0),
        ("<answer>ALL IN!</answer>", "raise to 1000", AnswerKind.FINE, 0),
        ("<answer>Call 7</answer>", "call", AnswerKind.FINE, 0),
    ],
)
def test_facing_a_bet_every_answer_has_an_outcome(words: str, action: str, verdict: AnswerKind, cost: float) -> None:
    turn = heads_up("3s 4s", "Ah Ad", DRY, opponent="tight").step(words)
    assert turn.info["action"].startswith(action)
    assert turn.info["verdict"] == verdict.value
    assert turn.reward == turn.info["chips"] - cost


def test_with_nothing_to_pay_a_call_and_a_fold_are_a_check() -> None:
    for action in ("call", "fold"):
        (turn,) = said(heads_up("Ah Ad", "3s 4s", DRY), action)
        assert (turn.info["action"], turn.info["verdict"], turn.done) == ("check", "adjusted", False)


VIEW = View(hole=cards("Ah Ad"), board=cards("2c 7d 9h"), pot=100, to_call=50, put_in=30, least=160, most=900)


@pytest.mark.parametrize(
    ("verb", "size", "expected"),
    [
        ("raise", "200", (220, AnswerKind.FINE)),
        ("raise", "min", (160, AnswerKind.FINE)),
        ("raise", "", (160, AnswerKind.ADJUSTED)),
        ("raise", "139", (160, AnswerKind.ADJUSTED)),
        ("raise", "max", (900, AnswerKind.FINE)),
        ("raise", "half-pot", (160, AnswerKind.FINE)),
        ("raise", "pot", (230, AnswerKind.FINE)),
        ("all-in", "", (900, AnswerKind.FINE)),
        ("call", "", (CALL, AnswerKind.FINE)),
        ("fold", "", (FOLD, AnswerKind.FINE)),
    ],
)
def test_sizes_are_bets_of_this_round(verb: str, size: str, expected: tuple[int, AnswerKind]) -> None:
    # 20 chips went in before this round, 10 in it; 50 are to be called, so a raise of the pot is to 30 + 50 + 150.
    assert meant(WordedAction(verb=verb, amount=size), VIEW, 20) == expected


def test_where_no_raise_is_legal_it_is_a_call() -> None:
    closed = View(hole=VIEW.hole, board=VIEW.board, pot=100, to_call=50, put_in=30, least=0, most=0)
    assert meant(WordedAction(verb="raise", amount="200"), closed, 20) == (CALL, AnswerKind.ADJUSTED)
    assert meant(WordedAction(verb="all-in"), closed, 20) == (CALL, AnswerKind.FINE)


@settings(max_examples=examples(40))
@given(
    players=st.integers(2, 10),
    seed=st.integers(0, 9),
    seq=st.integers(0, 1000),
    answers=st.lists(ACTIONS, min_size=1, max_size=12),
    opponents=st.lists(st.sampled_from(sorted(OPPONENTS)), min_size=1, max_size=3),
)
def test_whatever_is_answered_chips_are_conserved(players: int, seed: int, seq: int, answers: list[str], opponents: list[str]) -> None:
    task = Poker(players=players, opponents=opponents, stack=400, small_blind=5, big_blind=10, penalty=7)
    entry = json.loads(json.dumps(task.prompt(seed, seq).entry))
    hand = task._hand(entry)
    episode = HandEpisode(hand, penalty=7)
    turns: list[Turn] = []
    # All-in at the end, so that every hand is over.
    for answer in [*answers, "all-in"] * 2:
        turns.append(episode.step(f"<answer>{answer}</answer>"))
        if turns[-1].done:
            break
    num_penalised = sum(turn.info["verdict"] in {verdict.value for verdict in PENALISED} for turn in turns)
    net = sum(turn.reward for turn in turns) + 7 * num_penalised
    assert turns[-1].done
    assert net == pytest.approx(hand.net)
    assert -400 <= hand.net <= 400 * (players - 1)
    # Where the hand was played out the table's chips add up; where the policy folded, it has lost what it had put in.
    if hand._state.is_terminal():
        assert sum(hand._state.returns()) == pytest.approx(0)
        assert hand.net == hand._state.returns()[entry["seat"]]
    else:
        assert turns[-1].info["action"] == "fold"
        assert hand.net == -hand._put_in()[entry["seat"]]


def test_the_same_seed_and_seq_make_the_same_hand_against_the_same_play() -> None:
    def transcript(seq: int) -> list[object]:
        task, rng = Poker(players=4), random.Random(seq)
        prompt = task.prompt(3, seq)
        episode = task.environment(prompt.entry)
        turns: list[Turn] = []
        while not turns or not turns[-1].done:
            turns += said(episode, rng.choice(["call", "raise half-pot", "check"]))
        return [prompt, turns]

    first = [transcript(seq) for seq in range(20)]
    assert first == [transcript(seq) for seq in range(20)]
    assert Poker().prompt(0, 1) != Poker().prompt(1, 1) != Poker().prompt(1, 2)


def test_every_prompt_leaves_the_policy_a_decision() -> None:
    task = Poker(players=2, opponents="tight")
    # The tight button folds most hands to the big blind before it may act: those are dealt anew.
    attempts = {str(task.prompt(0, seq).entry["seed"]).rsplit("/", 1)[1] for seq in range(40)}
    assert len(attempts) > 1


def test_samples_of_a_group_see_the_same_board_whatever_they_bet() -> None:
    boards = set()
    for action in ("check", "bet 20", "bet 100"):
        turns = said(heads_up("Ah Ad", "3s 4s", DRY), "check", action, "check", "check")
        boards.add(turns[2].observation.split("Board: ")[1].split("]")[0])
    assert boards == {"[2c, 7d, 9h, Jc, Kd"}


def test_what_the_policy_is_shown_does_not_depend_on_cards_it_cannot_see() -> None:
    shown = []
    for other in ("3s 4s", "Ks Kc"):
        shown.append([turn.observation for turn in said(heads_up("Ah Ad", other, DRY), "check", "check", "check")])
    assert shown[0] == shown[1]


def test_scripted_players_play_as_they_are_called() -> None:
    good, poor = cards("Ah Kd"), cards("7h 2d")
    start = {"board": (), "pot": 30, "to_call": 20, "put_in": 0, "least": 40, "most": 1000}
    assert play_tightly(View(hole=poor, **start), random.Random(0)) == FOLD  # type: ignore[arg-type]
    assert play_tightly(View(hole=good, **start), random.Random(0)) == 45  # type: ignore[arg-type]
    dear = {**start, "to_call": 400, "least": 800}
    assert play_tightly(View(hole=good, **dear), random.Random(0)) == CALL  # type: ignore[arg-type]
    drawn = {play_randomly(View(hole=poor, **start), random.Random(seed)) for seed in range(60)}  # type: ignore[arg-type]
    assert {FOLD, CALL} < drawn
    assert all(action in (FOLD, CALL) or 40 <= action <= 1000 for action in drawn)
    assert FOLD not in {play_randomly(View(hole=poor, **{**start, "to_call": 0}), random.Random(seed)) for seed in range(60)}  # type: ignore[arg-type]


def test_a_reward_may_be_counted_in_big_blinds() -> None:
    (chips,), (blinds,) = (said(heads_up("3s 4s", "Ah Ad", DRY, unit=unit), "all-in") for unit in ("chips", "big-blinds"))
    assert (chips.reward, blinds.reward) == (-1000, -50)


def test_cards_have_their_usual_names() -> None:
    assert len({card_name(card) for card in range(NUM_CARDS)}) == 52
    assert [card_name(card) for card in cards("2c Td Ah As")] == ["2c", "Td", "Ah", "As"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"players": 1}, "from 2 to 10"),
        ({"players": True}, "from 2 to 10"),
        ({"stack": 30}, "from 40 to"),
        ({"small_blind": 50}, "from 1 to 20"),
        ({"opponents": ["tihgt"]}, "Did you mean 'tight'"),
        ({"unit": "chip"}, "Did you mean 'chips'"),
        ({"penalty": -1}, "no number from 0"),
    ],
)
def test_options_that_make_no_game_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Poker(**options)
    assert words in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "broken",
    [
        {"cards": [1, 2, 3]},
        {"cards": [0] * 9},
        {"cards": [[0]] * 9},
        {"opponents": [{}, "tight"]},
        {"seat": 2},
        {"opponents": ["tight"]},
        {"opponents": None},
    ],
)
def test_an_entry_that_is_no_hand_of_this_table_is_refused(broken: dict[str, object]) -> None:
    whole = {"cards": list(range(9)), "seat": 0, "opponents": ["tight", "tight"], "seed": "x"}
    with pytest.raises(ValueError, match="No hand of hold'em"):
        Poker(players=2).environment({**whole, **broken})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Raise to 60</answer>", WordedAction(verb="raise", amount="60")),
        ("<answer>bet half pot</answer>", WordedAction(verb="raise", amount="half-pot")),
        ("<answer>\nCALL\n</answer> trailing", WordedAction(verb="call")),
        ("<answer>allin</answer>", WordedAction(verb="all-in")),
        ("<answer>call</answer><answer>", WordedAction(verb="call")),
        ("<answer>raise 20 40</answer>", AnswerKind.UNKNOWN_ACTION),
        ("<answer></answer>", AnswerKind.UNKNOWN_ACTION),
        ("<answer>raise \u0664\u0660</answer>", AnswerKind.UNKNOWN_ACTION),
    ],
)
def test_answers_are_read(text: str, expected: WordedAction | AnswerKind) -> None:
    assert read_answer(text) == expected
