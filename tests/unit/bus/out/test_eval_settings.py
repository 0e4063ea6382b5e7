"""[[eval]] in a file: what it fills in, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_core.evaluation import held_out_seed
from echo_schemas.errors import UserError
from echo_schemas.records import Sampling
from echo_settings import load_settings
from echo_settings.rules import evaluation_specs


def load(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, {})


def test_what_a_section_leaves_open_is_as_in_the_run(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [task]
        name = "sort-digits"
        options = { a = 1 }
        [rollout]
        stop = ["!"]
        [rewards]
        exact = 1.0
        brevity = 0.5
        [[eval]]
        name = "own"
        [[eval]]
        name = "other"
        task = "reverse-digits"
        rewards = ["exact"]
        top_p = 0.9
        max_new_tokens = 4
        stop = []
        seed = 3
        """,
    )
    own, other = evaluation_specs(settings)
    assert (own.task, own.options, own.rewards, own.pass_reward) == ("sort-digits", {"a": 1}, ("exact", "brevity"), "exact")
    assert own.sampling == Sampling(max_new_tokens=8, stop=("!",))
    assert (other.task, other.options, other.rewards) == ("reverse-digits", {}, ("exact",))
    assert other.sampling == Sampling(max_new_tokens=4, top_p=0.9)
    assert (own.seed, other.seed) == (held_out_seed(0), held_out_seed(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[eval]\nname = 'a'", r"Write \[\[eval\]\], with two brackets"),
        ("[[eval]]\nname = 'a'\nprompt = 3", r"\[eval a\] has no key 'prompt'. Did you mean 'prompts'"),
        ("[[eval]]\nsamples = 2\npass_at = [1, 4]", "pass@4 of 2 samples; write samples = 4"),
        ("[[eval]]\nsamples = 2\npass_at = [0]", "k from 1 to 2"),
        ("[[eval]]\nsamples = 3\ntemperature = 0", "3 times the same answer"),
        ("[[eval]]\ntemperature = 0.001", "below 0.01"),
        ("[[eval]]\nprompts = 1", "greater than or equal to 2"),
        ("[[eval]]\nname = 'a b'", "cannot be part of a key"),
        ("[[eval]]\n[[eval]]", "two sections named 'held-out'"),
        ("[staleness]\npublication_period = 4\n[[eval]]\nevery = 6", "not a multiple of the publication period 4.*write every = 8"),
        ("[run]\nseed = 2_000_000_007\n[[eval]]", "training could meet held-out prompts"),
        ("[[eval]]\nmax_new_tokens = 64", "leaves no room for a prompt"),
        ("[[eval]]\npass_reward = 'brevity'", "pass_reward = 'brevity' is not one of its rewards: exact"),
        ("[[eval]]\nrewards = ['a']\npass_reward = 'b'", "not one of its rewards: a"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)
