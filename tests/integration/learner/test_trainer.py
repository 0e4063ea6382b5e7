"""The trainer on the real DeepSpeed with a small model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.forks.process import ForkingProcess, Refused
from tests.thorough import only_thorough

pytestmark = pytest.mark.slow

# Those between only spread what the last one spreads too.
STAGES = [0, *(pytest.param(stage, marks=only_thorough) for stage in (1, 2)), 3]
SCRIPT = [["step", 1, 1], ["step", 2, 2]]
Alone = dict[str, tuple[list[Any], dict[str, Any]]]


def deepspeed_file(folder: Path, content: object) -> str:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def weights_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.safetensors")
    found: dict[str, Any] = load_file(file)
    return found


def assert_close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        np.testing.assert_allclose(weight, other[name], atol=tolerance, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def alone(torch_process: ForkingProcess, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one rank makes of the script: numbers of the steps, and weights; of an adapter and of full weights."""
    found = {}
    for kind in ("lora", "full"):
        folder = tmp_path_factory.mktemp("alone") / kind
        steps = torch_process.run("train", base=str(base), script=[*SCRIPT, ["snapshot", str(folder)]], settings={"kind": kind})
        found[kind] = steps[:-1], weights_in(folder)
    return found


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_what_one_does(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, alone: Alone, kind: str, stage: int
) -> None:
    """Same numbers and same weights, under every ZeRO stage of a user's own file; the ranks as torchrun would start them."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    one, weights = alone[kind]
    two = torch_process.run(
        "train",
        base=str(base),
        script=[*SCRIPT, ["snapshot", str(tmp_path / "two")]],
        settings={"kind": kind, "deepspeed": own},
        ranks=2,
        launched=True,
    )
    for ours, theirs in zip(one, two[:-1], strict=True):
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=1e-4, abs=1e-6)
    assert_close(weights, weights_in(tmp_path / "two"))


def test_ranks_that_the_learner_starts_itself(torch_process: ForkingProcess, base: Path, tmp_path: Path, alone: Alone) -> None:
    """They do what it does, end with it when the policy diverges, and leave the sentence about it alone."""
    script = [*SCRIPT, ["save", str(tmp_path / "saved")], ["snapshot", str(tmp_path / "two")], ["bad_step", 3]]
    with pytest.raises(Refused, match=r"1 tokens of this step have a log-probability that is not finite.*lower \[learner\] lr"):
        torch_process.run("train", base=str(base), script=script, ranks=2)
    assert_close(alone["lora"][1], weights_in(tmp_path / "two"))
    assert list((tmp_path / "saved").rglob("*.pt"))


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_numbers_are_those_of_plain_torch(torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str) -> None:
    """Forward passes of one sample at a time without padding, the loss over the whole update, torch's AdamW and clipping."""
    settings = {"kind": kind, "weight_decay": 0.1, "max_grad_norm": 0.5}
    ours = torch_process.run("train", base=str(base), script=[*SCRIPT, ["snapshot", str(tmp_path / "ours")]], settings=settings)[:-1]
    theirs = torch_process.run("train_plainly", base=str(base), script=SCRIPT, settings=settings, folder=str(tmp_path / "theirs"))
    for mine, plain in zip(ours, theirs, strict=True):
        assert {name: mine[name] for name in plain} == pytest.approx(plain, rel=1e-4)
    assert_close(weights_in(tmp_path / "ours"), weights_in(tmp_path / "theirs"))


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"max_tokens": 1}], ids=["checkpointing", "one sample at a time"])
def test_how_memory_is_saved_changes_nothing(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    max_tokens = changes.pop("max_tokens", 10_000)
    for name, settings, tokens in (("plain", {}, 10_000), ("saving", changes, max_tokens)):
        script = [["step", 1, 1, tokens], ["step", 2, 2, tokens], ["snapshot", str(tmp_path / name)]]
        torch_process.run("train", base=str(base), script=script, settings={"kind": kind, **settings})
    assert_close(weights_in(tmp_path / "plain"), weights_in(tmp_path / "saving"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=only_thorough)])
def test_compiled_layers_train_what_plain_ones_do(torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str) -> None:
    """In batches of several rows, and of one; and a second process comes to the same bytes."""
    for name in ("plain", "compiled", "again"):
        script = [["step", 1, 1, 10_000], ["step", 2, 2, 1], ["snapshot", str(tmp_path / name)]]
        settings = {"kind": kind, "gradient_checkpointing": True, "compile": name != "plain"}
        torch_process.run("train", base=str(base), script=script, settings=settings)
    # An update of Adam moves a weight by the rate, 1e-3, and a small gradient's sign may be rounding.
    assert_close(weights_in(tmp_path / "plain"), weights_in(tmp_path / "compiled"), tolerance=1e-4)
    for tensor, values in weights_in(tmp_path / "compiled").items():
        assert np.array_equal(values, weights_in(tmp_path / "again")[tensor]), tensor


@pytest.mark.parametrize(("kind", "stage", "ranks"), [("lora", 0, 1), ("full", 0, 1), ("lora", 3, 2), ("full", 3, 2)])
def test_a_head_in_pieces_trains_what_a_whole_one_does(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, alone: Alone, kind: str, stage: int, ranks: int
) -> None:
    """Its pieces are computed again in the backward pass: under ZeRO-3 its weights, the embeddings' too, are gathered again."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    run = {"settings": {"kind": kind, "deepspeed": own}, "ranks": ranks, "launched": ranks > 1, "head_rows": 3}
    *steps, _ = torch_process.run("train", base=str(base), script=[*SCRIPT, ["snapshot", str(tmp_path / "pieces")]], **run)
    numbers, weights = alone[kind]
    for whole, pieces in zip(numbers, steps, strict=True):
        assert {name: pieces[name] for name in whole} == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert_close(weights, weights_in(tmp_path / "pieces"))


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"])
def test_no_more_logits_than_a_piece_are_there_at_once(torch_process: ForkingProcess, base: Path, settings: dict[str, Any]) -> None:
    rows, difference, largest = torch_process.run("most_logits", base=str(base), settings=settings, head_rows=7)
    assert rows == 7
    assert difference < 1e-5 * largest


@pytest.mark.parametrize(
    ("kind", "stage"), [("lora", 0), ("full", 3), *(pytest.param(*each, marks=only_thorough) for each in (("full", 0), ("lora", 2)))]
)
def test_bfloat16_follows_float32(torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, stage: int) -> None:
    """Small steps add up, which they do only on float32 master weights: bfloat16 alone would round each of them away."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    script = [["step", 1]] * 20
    rate = {"lora": 3e-4, "full": 1e-4}[kind]
    settings = {"kind": kind, "lr": rate}
    exact = torch_process.run("train", base=str(base), script=script, settings=settings)
    short = torch_process.run("train", base=str(base), script=script, settings={**settings, "dtype": "bfloat16", "deepspeed": own})
    assert short[0]["policy_loss"] == pytest.approx(exact[0]["policy_loss"], abs=0.03)
    assert short[0]["grad_norm_0"] == pytest.approx(exact[0]["grad_norm_0"], rel=0.1)
    learned = [steps[0]["policy_loss"] - steps[-1]["policy_loss"] for steps in (short, exact)]
    assert learned[0] == pytest.approx(learned[1], rel=0.2)


@pytest.mark.parametrize("stage", STAGES)
def test_many_gradients_in_bfloat16_add_up(torch_process: ForkingProcess, base: Path, tmp_path: Path, stage: int) -> None:
    """A hundred gradients of a 600th each are a sixth; one after the other they would be lost beside a one in bfloat16."""
    settings = {"dtype": "bfloat16", "deepspeed": deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})}
    one, many = (
        torch_process.run("train", base=str(base), script=[["repeated_step", advantages]], settings=settings)[0]["grad_norm_0"]
        for advantages in ([1.0], [1.0] + [1 / 600] * 100)
    )
    assert many == pytest.approx(one * (1 + 1 / 6) / 101, rel=0.02)


@pytest.mark.parametrize(("kind", "stage", "ranks"), [("lora", 0, 1), ("full", 0, 1), ("lora", 2, 2), ("full", 3, 2)])
def test_going_on_from_a_checkpoint_is_bit_for_bit_the_same(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    settings = {"kind": kind, "deepspeed": deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}}), "warmup_steps": 5}
    saved = str(tmp_path / "saved")
    through = [["step", 1], ["step", 2, 2], ["save", saved], ["step", 3, 2], ["step", 4], ["snapshot", str(tmp_path / "through")]]
    resumed = [["load", saved], ["step", 3, 2], ["step", 4], ["snapshot", str(tmp_path / "resumed")]]
    run = {"base": str(base), "settings": settings, "ranks": ranks, "launched": ranks > 1}
    expected = torch_process.run("train", script=through, **run)
    found = torch_process.run("train", script=resumed, **run)
    assert found[1:] == expected[3:], "numbers and checksum"


def test_each_update_of_a_step_starts_from_the_one_before(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    steps = torch_process.run("train", base=str(base), script=[["step", 1, 4], ["step", 1, 1]], settings={"lr": 3e-3})
    four, one = steps
    assert len([name for name in four if name.startswith("grad_norm_")]) == 4
    assert len([name for name in one if name.startswith("grad_norm_")]) == 1
    assert four["update_kl"] > 0, "later updates see the policy move away from the step's start"
    assert one["update_kl"] == 0
    assert four["num_tokens"] == one["num_tokens"]


def test_the_rate_warms_up(torch_process: ForkingProcess, base: Path) -> None:
    steps = torch_process.run(
        "train", base=str(base), script=[["step", 1, 2], ["step", 2], ["step", 3]], settings={"warmup_steps": 4, "lr": 4e-3}
    )
    assert [step["lr"] for step in steps] == pytest.approx([2e-3, 3e-3, 4e-3])


def test_the_rate_falls_and_goes_on_falling_from_a_checkpoint(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    settings = {"lr": 4e-3, "schedule": "linear", "decay_steps": 4, "min_lr": 2e-3}
    through = [["step", 1], ["step", 2, 2], ["save", str(tmp_path / "saved")], ["step", 3], ["step", 4]]
    rates = [step["lr"] for step in torch_process.run("train", base=str(base), script=through, settings=settings) if step]
    assert rates == pytest.approx([4e-3, 3e-3, 2.5e-3, 2e-3])
    resumed = [["load", str(tmp_path / "saved")], ["step", 3], ["step", 4]]
    found = [step["lr"] for step in torch_process.run("train", base=str(base), script=resumed, settings=settings) if step]
    assert found == rates[2:]


@pytest.mark.parametrize("ranks", [1, 2])
def test_logprobs_that_nobody_said_are_the_learner_s_own_at_the_step_s_start(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, ranks: int
) -> None:
    """The same numbers and weights as if they had been computed before, over one update and over two, on one rank and on two."""
    found = {}
    for name in ("unsaid_step", "by_hand_step"):
        folder = tmp_path / name
        script = [[name, 1, 1], [name, 2, 2], ["snapshot", str(folder)]]
        found[name] = (
            torch_process.run("train", base=str(base), script=script, settings={}, ranks=ranks, launched=ranks > 1)[:2],
            weights_in(folder),
        )
    unsaid, by_hand = found["unsaid_step"], found["by_hand_step"]
    for one, other in zip(unsaid[0], by_hand[0], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], abs=1e-5), name
    assert_close(unsaid[1], by_hand[1])


@pytest.mark.parametrize(("kind", "ranks"), [("lora", 1), ("lora", 2), ("full", 2)])
def test_a_step_says_how_far_learner_and_sampler_were_apart_at_its_start(
    torch_process: ForkingProcess, base: Path, kind: str, ranks: int
) -> None:
    """Of fresh samples, over one update and over two, on one rank and on two: what the remembered version says of them after the step."""
    found = torch_process.run(
        "train",
        base=str(base),
        script=[["compared_step", 1, 1], ["compared_step", 2, 2]],
        settings={"kind": kind, "lr": 3e-3},
        ranks=ranks,
        launched=ranks > 1,
    )
    for in_training, by_hand in found:
        assert np.isfinite(in_training).sum() >= len(in_training) // 2 - 1
        np.testing.assert_allclose(in_training, by_hand, atol=1e-5)


@pytest.mark.parametrize(("stage", "at_most", "kept"), [(0, 2, [2, 3]), (2, 9, [0, 1, 2, 3]), (0, 0, []), (3, 2, [])])
def test_as_many_versions_are_remembered_as_fit(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, stage: int, at_most: int, kept: list[int]
) -> None:
    """None where parameters are spread over ranks."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    found = torch_process.run(
        "train", base=str(base), script=[["remembered", at_most]], settings={"deepspeed": own}, ranks=2, launched=True
    )
    assert found == [kept]
