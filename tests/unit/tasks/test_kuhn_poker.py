"""Kuhn poker: the rules against a table written by hand, chips conserved, hands repeated, hostile answers."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.errors import UserError
from echo_tasks.poker.episode import PENALISED, AnswerKind, HandEpisode, read_answer
from echo_tasks.poker.kuhn import OPPONENTS, KuhnPoker
from echo_tasks.task import Turn

ANSWERS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["Check", "Bet", "Call", "Fold", "raise 10", "all-in", "Fold || Call", "call" * 40]).map(
        lambda action: f"so <answer> {action}</answer>"
    ),
)


def entry(cards: tuple[int, int], seat: int, opponent: str) -> dict[str, object]:
    """A hand of these cards."""
    return {"cards": list(cards), "seat": seat, "opponent": opponent, "seed": "a test"}


def played(episode: HandEpisode, *actions: str) -> list[Turn]:
    """The turns that these actions make."""
    return [episode.step(f"<answer>{action}</answer>") for action in actions]


@pytest.mark.parametrize(
    ("cards", "seat", "opponent", "actions", "rewards"),
    [
        # The call-station checks and calls.
        ((2, 0), 0, "call-station", ["check"], [1]),
        ((2, 0), 0, "call-station", ["bet"], [2]),
        ((0, 1), 0, "call-station", ["bet"], [-2]),
        ((1, 2), 1, "call-station", ["check"], [1]),
        ((1, 2), 1, "call-station", ["bet"], [2]),
        # The tight one bets and calls with the King alone.
        ((1, 0), 0, "tight", ["bet"], [1]),
        ((1, 2), 0, "tight", ["check", "fold"], [-1, 0]),
        ((1, 2), 0, "tight", ["check", "call"], [-1, -1]),
        ((2, 1), 1, "tight", ["fold"], [-1]),
        ((2, 1), 1, "tight", ["call"], [-2]),
    ],
)
def test_a_hand_ends_as_the_rules_say_and_each_turn_earns_its_change_of_chips(
    cards: tuple[int, int], seat: int, opponent: str, actions: list[str], rewards: list[float]
) -> None:
    turns = played(KuhnPoker().environment(entry(cards, seat, opponent)), *actions)
    assert [turn.reward for turn in turns] == rewards
    assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]


@pytest.mark.parametrize(
    ("said", "done", "verdict", "cost"),
    [
        ("<answer>Check</answer>", "fold", AnswerKind.ILLEGAL, 1.0),
        ("<answer>Raise 5</answer>", "call", AnswerKind.ADJUSTED, 0.0),
        ("<answer>Stand up</answer>", "fold", AnswerKind.UNKNOWN_ACTION, 1.0),
        ("I call.", "fold", AnswerKind.NO_ANSWER, 1.0),
        ("", "fold", AnswerKind.NO_ANSWER, 1.0),
        ("</answer><answer>call", "fold", AnswerKind.NO_ANSWER, 1.0),
        ("<answer>fold</answer> no, <answer>CALL.</answer>", "call", AnswerKind.FINE, 0.0),
        ("<answer>" * 10_000 + "call</answer>", "call", AnswerKind.FINE, 0.0),
    ],
)
def test_facing_a_bet_every_answer_has_an_outcome(said: str, done: str, verdict: AnswerKind, cost: float) -> None:
    # The opponent is first, holds the King and has bet.
    turn = KuhnPoker().environment(entry((2, 0), 1, "tight")).step(said)
    assert (turn.info["action"], turn.info["verdict"], turn.done) == (done, verdict.value, True)
    assert turn.reward == (-1.0 if done == "fold" else -2.0) - cost


@pytest.mark.parametrize("said", ["call", "fold"])
def test_with_nothing_to_pay_a_call_and_a_fold_are_a_check(said: str) -> None:
    (turn,) = played(KuhnPoker().environment(entry((2, 0), 0, "call-station")), said)
    assert (turn.info["action"], turn.info["verdict"], turn.reward) == ("check", "adjusted", 1.0)


@given(
    seed=st.integers(0, 99),
    seq=st.integers(0, 10_000),
    answers=st.lists(ANSWERS, min_size=2, max_size=2),
    style=st.sampled_from(["chat", "digits"]),
)
def test_whatever_is_answered_the_hand_ends_within_two_turns_and_chips_are_conserved(
    seed: int, seq: int, answers: list[str], style: str
) -> None:
    task = KuhnPoker(opponents=list(OPPONENTS), penalty=3.0, style=style)
    prompt = task.prompt(seed, seq)
    episode, turns = task.environment(json.loads(json.dumps(prompt.entry))), []
    for answer in answers:
        turns.append(episode.step(answer))
        if turns[-1].done:
            break
    assert turns[-1].done
    num_penalised = sum(turn.info["verdict"] in {verdict.value for verdict in PENALISED} for turn in turns)
    net = sum(turn.reward for turn in turns) + 3.0 * num_penalised
    assert net in {-2.0, -1.0, 1.0, 2.0}
    with pytest.raises(ValueError, match="over"):
        episode.step("")


def test_the_same_seed_and_seq_make_the_same_hand_and_the_same_opponent() -> None:
    def transcript(seq: int) -> list[object]:
        task = KuhnPoker(opponents=["random", "equilibrium"])
        prompt = task.prompt(5, seq)
        episode = task.environment(prompt.entry)
        first = episode.step("<answer>Check</answer>")
        return [prompt, first, first.done or episode.step("<answer>Call</answer>")]

    assert [transcript(seq) for seq in range(50)] == [transcript(seq) for seq in range(50)]
    assert len({json.dumps(dict(KuhnPoker().prompt(5, seq).entry)["cards"]) for seq in range(50)}) == 6


def test_what_the_policy_is_shown_does_not_depend_on_the_card_it_cannot_see() -> None:
    task = KuhnPoker()
    for style in ("chat", "digits"):
        shown = {KuhnPoker(style=style)._hand(entry((0, other), 0, "call-station")).shown() for other in (1, 2)}
        assert len(shown) == 1
    assert "Betting: Opponent bets\nLegal: Fold or Call" in task._hand(entry((2, 0), 1, "tight")).shown()


def test_nobody_beats_the_equilibrium() -> None:
    """The best answer to it, over all plans of a seat, wins 1/18 as second player and -1/18 as first (Kuhn, 1950)."""
    import pyspiel

    game, equilibrium = pyspiel.load_game("kuhn_poker"), OPPONENTS["equilibrium"]

    def value(state: Any, cards: tuple[int, int], seat: int, plan: dict[tuple[int, bool], tuple[float, ...]], history: list[int]) -> float:
        if state.is_terminal():
            return float(state.returns()[seat])
        player, faces_bet = state.current_player(), history[-1:] == [1]
        chance = plan[player, faces_bet][cards[player]] if player == seat else equilibrium(player, cards[player], faces_bet)
        total = 0.0
        for action, weight in ((0, 1 - chance), (1, chance)):
            if weight:
                child = state.child(action)
                total += weight * value(child, cards, seat, plan, [*history, action])
        return total

    for seat, expected in ((0, -1 / 18), (1, 1 / 18)):
        best = -2.0
        for bits in range(64):
            plan = {(seat, facing): tuple(float(bits >> (3 * facing + card) & 1) for card in range(3)) for facing in (False, True)}
            mean = 0.0
            for cards in permutations(range(3), 2):
                state = game.new_initial_state()
                for card in cards:
                    state.apply_action(card)
                mean += value(state, cards, seat, plan, []) / 6
            best = max(best, mean)
        assert best == pytest.approx(expected)


def test_digits_are_a_conversation_without_words() -> None:
    task = KuhnPoker(opponents="tight", style="digits")
    episode = task.environment(entry((1, 2), 0, "tight"))
    assert episode.reset().text == ""
    assert episode.step("0") == Turn(
        observation="101>", reward=-1.0, done=False, info={"action": "check", "verdict": "fine", "chips": -1.0}
    )
    assert episode.step(" 1999").reward == -1.0
    assert task.prompt(0, 3).text[-1] == ">"


def test_the_prompt_tells_the_rules_and_the_form_of_the_answer() -> None:
    system, user = KuhnPoker().prompt(0, 0).messages
    assert (system.role, user.role) == ("system", "user")
    assert user.content.startswith("Turn 1\nState: Hand: ")
    assert user.content.endswith("<answer>ACTION</answer>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"opponents": "equilibrum"}, "Did you mean 'equilibrium'"),
        ({"opponents": []}, "is no list of names"),
        ({"opponents": 3}, "is no list of names"),
        ({"penalty": "much"}, "no number from 0"),
        ({"penalty": float("nan")}, "no number from 0"),
        ({"style": "digit"}, "Did you mean 'digits'"),
    ],
)
def test_options_that_make_no_game_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as caught:
        KuhnPoker(**options)  # type: ignore[arg-type]
    assert words in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "broken",
    [{}, {"cards": [0, 0]}, {"cards": [0, 7]}, {"cards": "01"}, {"cards": [[0], 1]}, {"cards": [0]}, {"seat": 2}, {"opponent": "nobody"}],
)
def test_an_entry_that_is_no_hand_is_refused(broken: dict[str, object]) -> None:
    whole = entry((0, 1), 0, "random")
    with pytest.raises(ValueError, match="No hand of Kuhn poker"):
        KuhnPoker().environment({**whole, **broken} if broken else {})


@given(st.text(max_size=80))
def test_any_text_is_read_as_something(text: str) -> None:
    said = read_answer(text)
    assert isinstance(said, AnswerKind) or said.verb in {"fold", "check", "call", "raise", "all-in"}
