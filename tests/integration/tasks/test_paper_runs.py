"""A scaled-down twin of each of the papers' runs: its file with a tiny model, and everything that decides how it trains left as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from echo_schemas.columns import view_tokens
from echo_schemas.naming import Namespace
from echo_schemas.records import LogprobDistribution, Purpose, StepReport, Trajectory, WeightManifest
from echo_schemas.topics import STEPS, TRAJECTORIES, WEIGHTS
from echo_settings import Settings, load_settings
from tests.installed import missing
from tests.integration.tasks.chat_model import write_model
from tests.integration.tasks.toy_runs import ROOT, RUN_S, ToyRun, run_to_end
from tests.thorough import only_thorough

_MISSING = missing("torch", "transformers", "faust", "deepspeed", "reasoning_gym", "pyspiel")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(RUN_S + 600),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
# Both publish after every second step, or after each.
NUM_STEPS = 4
SMALL = {
    "ECHO_POLICY__DTYPE": "float32",
    "ECHO_POLICY__LORA__R": "4",
    "ECHO_ROLLOUT__ENGINE": "transformers",
    "ECHO_ROLLOUT__OPTIONS": '{"device": "cpu"}',
    "ECHO_ROLLOUT__WORKERS": "1",
    "ECHO_ROLLOUT__GROUP_SIZE": "4",
    "ECHO_LEARNER__GROUPS_PER_STEP": "4",
    "ECHO_LEARNER__STEPS": str(NUM_STEPS),
    "ECHO_LEARNER__RANKS": "1",
    "ECHO_LEARNER__DEEPSPEED": "",
}
# In place of mathematics, which needs a model that knows some: digits backwards.
DIGITS = {
    "ECHO_TASK__NAME": "reverse-digits",
    "ECHO_TASK__OPTIONS": "{}",
    "ECHO_REWARDS__EXACT": "1.0",
    "ECHO_POLICY__BASE": "demo:tiny-qwen3",
    "ECHO_POLICY__MAX_LENGTH": "64",
    "ECHO_ROLLOUT__MAX_NEW_TOKENS": "8",
}
VLLM_RAW = {"ECHO_ROLLOUT__ENGINE": "vllm", "ECHO_ROLLOUT__OPTIONS": '{"logprobs_mode": "raw_logprobs"}'}
TWINS = [
    pytest.param("echo2/qwen3-8b", DIGITS, id="echo2/qwen3-8b"),
    *(
        pytest.param(example, changes, id=example, marks=only_thorough)
        for example, changes in (
            ("echo2/qwen3-4b", DIGITS | VLLM_RAW),
            ("echo2/poker-qwen3-0.6b", {"ECHO_POLICY__MAX_LENGTH": "2400", "ECHO_ROLLOUT__MAX_NEW_TOKENS": "60"}),
            ("echo/math-qwen2.5-7b", DIGITS),
            ("echo/sokoban-qwen3-4b", {"ECHO_POLICY__MAX_LENGTH": "1600", "ECHO_ROLLOUT__MAX_NEW_TOKENS": "80"}),
            ("echo/sokoban-qwen3-30b-a3b", {"ECHO_POLICY__MAX_LENGTH": "1600", "ECHO_ROLLOUT__MAX_NEW_TOKENS": "80"}),
            ("echo/knights-knaves-qwen3-32b-lora", {"ECHO_POLICY__MAX_LENGTH": "1600", "ECHO_ROLLOUT__MAX_NEW_TOKENS": "40"}),
        )
    ),
]


@pytest.mark.parametrize(("example", "changes"), TWINS)
def test_the_twin_trains_as_the_paper_s_run_would(tmp_path: Path, kafka_bootstrap: str, example: str, changes: Mapping[str, str]) -> None:
    if "vllm" in changes.values() and (absent := missing("vllm")):
        pytest.skip(f"{absent} is missing: install the extra 'rollout-cpu'")
    if changes.get("ECHO_POLICY__BASE") is None:
        changes = {**changes, "ECHO_POLICY__BASE": str(write_model(tmp_path / "base"))}
    config = tmp_path / "run.toml"
    sections = {"eval", "rewards"} if changes.get("ECHO_TASK__NAME") else {"eval"}
    config.write_text(without((ROOT / "examples" / f"{example}.toml").read_text(encoding="utf-8"), sections), encoding="utf-8")
    namespace = Namespace(f"it.{example.replace('/', '-')}").name
    run = run_to_end(config, {**SMALL, **changes}, folder=tmp_path, bootstrap=kafka_bootstrap, namespace=namespace)
    check(run, load_settings(config, {**SMALL, **changes}))


def without(text: str, names: Collection[str]) -> str:
    """A run's file without some sections, which no variable of the environment can take away."""
    parts = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if part.partition("\n")[0].strip("[]") not in names)


def check(run: ToyRun, settings: Settings) -> None:
    """All steps, as old as they may be, in as many updates and as often published as the file says; learner and worker agree."""
    assert (run.summary["outcome"], run.summary["steps"]) == ("finished", NUM_STEPS)
    reports = list(run.records(STEPS, StepReport).values())
    assert [report.version for report in reports] == list(range(1, NUM_STEPS + 1))
    assert run.summary["max_staleness"] <= settings.budget
    for report in reports:
        assert report.batch is not None
        assert len(view_tokens(report.batch.updates)) == settings.learner.updates_per_step
    kappa = settings.publication_period
    published = {manifest.version for manifest in run.records(WEIGHTS, WeightManifest).values()}
    assert published == set(range(0, NUM_STEPS + 1, kappa))

    samples = [sample for sample in run.records(TRAJECTORIES, Trajectory).values() if sample.purpose is Purpose.TRAIN]
    raw = "raw_logprobs" in json.dumps(settings.rollout.options)
    assert {sample.logprob_distribution for sample in samples} == {LogprobDistribution.FULL if raw else LogprobDistribution.DRAWN}
    assert {sample.sampling.top_p for sample in samples} == {settings.rollout.top_p}
    assert {sample.is_cut for sample in samples} == {settings.rollout.top_p < 1 and not raw}
    assert run.summary["logprob_samples"] > 0
    assert run.summary["logprob_max_diff"] < 1e-4
