"""A checkpoint read by another number of ranks than wrote it, or under another ZeRO stage, or for its weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks.process import ForkingProcess, Refused
from tests.integration.learner.test_trainer import assert_close, deepspeed_file, weights_in

pytestmark = pytest.mark.slow


def train(torch_process: ForkingProcess, base: Path, script: list[list[Any]], folder: Path, **how: Any) -> list[Any]:
    """Run a script on so many ranks under a ZeRO stage, of an adapter or of all weights."""
    ranks, stage, kind, dtype = how["ranks"], how["stage"], how["kind"], how.get("dtype", "float32")
    own = deepspeed_file(folder, {"zero_optimization": {"stage": stage}})
    settings = {"kind": kind, "dtype": dtype, "deepspeed": own, "warmup_steps": 5}
    answers: list[Any] = torch_process.run("train", base=str(base), script=script, settings=settings, ranks=ranks, launched=ranks > 1)
    return answers


@pytest.mark.parametrize(
    ("kind", "dtype", "wrote", "reads"),
    [
        ("lora", "float32", (1, 0), (2, 0)),
        ("full", "float32", (1, 1), (2, 1)),
        ("lora", "float32", (1, 2), (2, 2)),
        ("full", "float32", (2, 2), (1, 2)),
        ("lora", "float32", (2, 3), (1, 3)),
        ("full", "float32", (1, 3), (2, 3)),
        ("lora", "float32", (2, 2), (2, 1)),
        ("full", "bfloat16", (2, 2), (1, 2)),
        ("lora", "bfloat16", (1, 0), (2, 0)),
    ],
    ids=str,
)
def test_a_run_goes_on_over_other_ranks(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, dtype: str, wrote: tuple[int, int], reads: tuple[int, int]
) -> None:
    """Two steps, two more elsewhere; as if all four had been trained where the first two were. Optimizer and warm-up included."""
    saved, first, second = str(tmp_path / "v2" / "trainer"), tmp_path / "through", tmp_path / "resumed"
    here = {"kind": kind, "dtype": dtype, "ranks": wrote[0], "stage": wrote[1]}
    there = {"kind": kind, "dtype": dtype, "ranks": reads[0], "stage": reads[1]}
    later = [["step", 3, 2], ["step", 4]]
    through = train(torch_process, base, [["step", 1], ["step", 2, 2], ["save", saved], *later, ["snapshot", str(first)]], tmp_path, **here)
    resumed = train(torch_process, base, [["load", saved], *later, ["snapshot", str(second)]], tmp_path, **there)
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    for expected, found in zip(through[3:5], resumed[1:3], strict=True):
        assert found["lr"] == expected["lr"]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=tolerance, abs=tolerance)
    if dtype == "float32":
        assert_close(weights_in(first), weights_in(second))
    assert not list(tmp_path.glob(".*universal")), "what was converted is removed"


@pytest.mark.parametrize(("wrote", "reads"), [(0, 2), (3, 1)])
def test_a_stage_that_cannot_read_the_optimizer_says_so(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, wrote: int, reads: int
) -> None:
    saved = str(tmp_path / "v1" / "trainer")
    train(torch_process, base, [["step", 1], ["save", saved]], tmp_path, kind="lora", ranks=1, stage=wrote)
    with pytest.raises(
        Refused, match=f"written under ZeRO stage {wrote}, and stage {reads} cannot read.*fork NAME --version N --weights-only"
    ):
        train(torch_process, base, [["load", saved]], tmp_path, kind="lora", ranks=1, stage=reads)


@pytest.mark.parametrize(("ranks", "spoilt"), [(1, "*_optim_states.pt"), (2, "*_optim_states.pt"), (2, "*_model_states.pt")])
def test_a_state_that_cannot_be_converted_ends_every_rank_with_a_sentence(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, ranks: int, spoilt: str
) -> None:
    saved = tmp_path / "v1" / "trainer"
    train(torch_process, base, [["step", 1], ["save", str(saved)]], tmp_path, kind="lora", ranks=3 - ranks, stage=2)
    file = next((saved / "trainer").glob(spoilt))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Refused, match=f"could not be made readable for {ranks} ranks.*Set .learner. ranks"):
        train(torch_process, base, [["load", str(saved)]], tmp_path, kind="lora", ranks=ranks, stage=2)
    assert not list(tmp_path.glob(".*universal"))


@pytest.mark.parametrize(
    ("kind", "dtype", "ranks", "stage"),
    [
        ("lora", "float32", 1, 0),
        ("full", "float32", 1, 2),
        ("lora", "float32", 2, 3),
        ("full", "bfloat16", 1, 0),
        ("full", "bfloat16", 2, 2),
    ],
)
def test_weights_alone_are_a_beginning(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, dtype: str, ranks: int, stage: int
) -> None:
    """The same snapshot comes out again, and a step later the weights have moved from it: the optimizer's own copy was replaced too."""
    how = {"kind": kind, "dtype": dtype, "ranks": ranks, "stage": stage}
    taken, again, moved = (str(tmp_path / name) for name in ("taken", "again", "moved"))
    (*_, sha256) = train(torch_process, base, [["step", 1], ["step", 2], ["snapshot", taken]], tmp_path, **how)
    script: list[list[Any]] = [["load_weights", taken], ["snapshot", again], ["step", 3], ["snapshot", moved, 1]]
    _, found, _, after = train(torch_process, base, script, tmp_path, **how)
    assert found == sha256
    assert after != sha256
    if dtype == "float32":
        before, now = weights_in(Path(taken)), weights_in(Path(moved))
        # One update of Adam moves a weight by the learning rate, which warms up from a fifth, and not back to where the base model was.
        assert max(abs(now[name] - weight).max() for name, weight in before.items()) <= 2e-4 * 1.01


def test_weights_of_another_policy_are_refused(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    taken = str(tmp_path / "taken")
    train(torch_process, base, [["snapshot", taken]], tmp_path, kind="lora", ranks=1, stage=0)
    with pytest.raises(Refused, match=r"are of another policy: .* has the shape .* \[policy\] base, update and lora must be"):
        torch_process.run("train", base=str(base), script=[["load_weights", taken]], settings={"kind": "lora", "lora_r": 4})
    with pytest.raises(Refused, match="cannot be read"):
        torch_process.run("train", base=str(base), script=[["load_weights", str(tmp_path)]], settings={"kind": "lora"})
