"""The whole learner on the real DeepSpeed over a cluster in memory, as a job. Arguments and results are JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echo_learner.run import run_learner
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.errors import UserError
from echo_schemas.records import Purpose, Span, VersionSpan
from echo_schemas.topics import TRAJECTORIES
from tests.contract.engines.snapshots import VOCABULARY
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline, sample

NUM_PROMPT, NUM_GENERATED = 3, 4


def run(
    folder: str, base: str, steps: int, *, sections: Mapping[str, Any], python_path: str = "", dies_at_commit: int = 0, probes: bool = False
) -> dict[str, Any]:
    """Groups for so many steps, a learner until it ends, and what it left in the log.

    `dies_at_commit`: the transactional producer of that commit is dead, without a successor. `probes`: one probe group of version 0,
    and the log-probabilities of everything are those of plain transformers.
    """
    if python_path:
        sys.path.insert(0, python_path)
    pipeline = Pipeline(Path(folder), options=_with_base(sections, base, steps))
    model = _load(base) if probes else None
    for seq in range(steps * GROUPS_PER_STEP):
        _write_group(pipeline, seq, model)
    if model is not None:
        answer = _random_answer(77, model)
        pipeline.write(TRAJECTORIES, *(sample(0, index, purpose=Purpose.PROBE, **answer) for index in range(GROUP_SIZE)))
    if dies_at_commit:
        _kill_producer(pipeline, dies_at_commit)
    refused = ""
    try:
        run_learner(pipeline.process())
    except UserError as exc:
        refused = str(exc)
    return {
        "refused": refused,
        "metrics": [report.metrics for report in pipeline.reports()],
        "sessions": len({report.session for report in pipeline.reports()}),
        "published": [manifest.version for manifest in pipeline.manifests()],
        "sha256": [manifest.sha256 for manifest in pipeline.manifests()],
        "config": [manifest.config for manifest in pipeline.manifests()],
        "checkpoints": sorted({name.partition("-")[0] for name in pipeline.store.ids()}),
    }


def _with_base(sections: Mapping[str, Any], base: str, steps: int) -> dict[str, dict[str, Any]]:
    options: dict[str, dict[str, Any]] = {name: dict(values) for name, values in sections.items()}
    options["policy"] = {"base": base, "lora": {"r": 8, "alpha": 16}, **options.get("policy", {})}
    # What it trains on was never sampled: any log-probability will do.
    options["learner"] = {"steps": steps, "lr": 1e-3, "logprob_tolerance": 100.0, **options.get("learner", {})}
    return options


def _load(base: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)


def _write_group(pipeline: Pipeline, seq: int, model: Any) -> None:
    members = [sample(seq, index, **_random_answer(GROUP_SIZE * seq + index, model)) for index in range(GROUP_SIZE)]
    for member, where in zip(members, pipeline.write(TRAJECTORIES, *members), strict=True):
        pipeline.write_reward(member, where, float(member.index))


def _random_answer(seed: int, model: Any) -> dict[str, Any]:
    """Random tokens, with the log-probabilities that `model` gives them; without a model, some."""
    random = np.random.default_rng(seed)
    end = NUM_PROMPT + NUM_GENERATED
    tokens = random.integers(2, VOCABULARY, end).tolist()
    return {
        "token_ids": pack_tokens(tokens),
        "generated": (Span(start=NUM_PROMPT, end=end),),
        "version_spans": (VersionSpan(start=NUM_PROMPT, end=end, version=0),),
        "logprobs": pack_logprobs((-3 - random.random(NUM_GENERATED)).tolist() if model is None else _logprobs(model, tokens)),
    }


def _logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    import torch

    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
    return [float(logprobs[place - 1, tokens[place]]) for place in range(NUM_PROMPT, len(tokens))]


def _kill_producer(pipeline: Pipeline, number: int) -> None:
    commits = 0

    def before(operation: str) -> None:
        nonlocal commits
        commits += operation == "commit_transaction"
        if commits == number and operation == "commit_transaction":
            pipeline.cluster.fence(pipeline.namespace.transactional_id("learner"))

    pipeline.cluster.faults.before = before
