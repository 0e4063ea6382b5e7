"""The whole learner on the real DeepSpeed over a cluster in memory, as a job. Arguments and results are JSON."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from echo_bus.client.kafka import KafkaCluster
from echo_learner.metrics import LearnerMetrics
from echo_learner.run import run_learner, train_in_sessions
from echo_learner.start.beginning import StartOptions
from echo_learner.training.config import trainer_config
from echo_learner.training.ranks import open_trainer
from echo_ops.cli.retrain import parse_versions
from echo_replay.history import History
from echo_replay.retrain import RetrainParts, TrainingLog, plan_retraining, retrain
from echo_replay.weight_distance import weight_distance
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Purpose, Span, VersionSpan
from echo_schemas.topics import TRAJECTORIES
from echo_tasks.catalogue import load_task
from tests.contract.engines.snapshots import VOCABULARY
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, NumberCodec, Pipeline
from tests.unit.replay.forged import Kept, SoundRun, everything

if TYPE_CHECKING:
    from echo_memory import MemoryCluster

EXAMPLES = Path(__file__).parents[3] / "examples"
NUM_PROMPT, NUM_GENERATED = 3, 4
STEPS_TO_RETRAIN = 4
_LOOK_S = 0.02


class RandomPrompts(NumberCodec):
    """The prompt of seq n is n to `AnyTask`, and these tokens to the model."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.random.default_rng(int(text)).integers(2, VOCABULARY, NUM_PROMPT, dtype=np.int32)


def run(
    folder: str, base: str, steps: int, *, sections: Mapping[str, Any], python_path: str = "", dies_at_commit: int = 0, probes: bool = False
) -> dict[str, Any]:
    """Groups for so many steps, a learner until it ends, and what it left in the log.

    `dies_at_commit`: the transactional producer of that commit is dead, without a successor. `probes`: one probe group of version 0,
    and the log-probabilities of everything are those of plain transformers.
    """
    if python_path:
        sys.path.insert(0, python_path)
    options = _with_base(sections, base, steps)
    options["rollout"] = {"probe_size": GROUP_SIZE if probes else 0, **options.get("rollout", {})}
    pipeline = Pipeline(Path(folder), options=options)
    model = _load(base) if probes else None
    if dies_at_commit:
        _kill_producer(pipeline, dies_at_commit)
    refused = ""
    try:
        with _answers(pipeline, steps, model), patch("echo_learner.run.PromptCodec", lambda base: RandomPrompts()):
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


def load_from_log(folder: str, base: str, bootstrap: str, namespace: str) -> dict[str, Any]:
    """A learner of one step on a real cluster; then examples/load_adapter.py, beside PEFT's reading of the checkpoint."""
    from peft import PeftModel, get_peft_model_state_dict

    options = _with_base({}, base, 1)
    # The same seam; what only the cluster in memory has is not used here.
    cluster = cast("MemoryCluster", KafkaCluster(bootstrap))
    pipeline = Pipeline(Path(folder) / "run", cluster=cluster, namespace=Namespace(namespace), options=options)
    with _answers(pipeline, 1, None), patch("echo_learner.run.PromptCodec", lambda base: RandomPrompts()):
        run_learner(pipeline.process())
    example = runpy.run_path(str(EXAMPLES / "load_adapter.py"))
    loaded, manifest = example["load"](bootstrap, namespace, "demo", base, Path(folder) / "adapter")
    (saved,) = (path.parent for path in pipeline.folder.rglob("adapter_config.json") if f"/v{manifest.version}-" in str(path))
    expected = get_peft_model_state_dict(PeftModel.from_pretrained(_load(base), saved))
    found = get_peft_model_state_dict(loaded)
    return {
        "version": manifest.version,
        "equal": [name for name, value in expected.items() if (found[name] == value).all()] == list(found),
        "largest": max(float(value.abs().max()) for name, value in found.items() if "lora_B" in name),
        "base": json.loads(manifest.config)["base_model_name_or_path"],
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


@contextmanager
def _answers(pipeline: Pipeline, steps: int, model: Any) -> Iterator[None]:
    """As soon as version 0 is public, groups of it for so many steps, and with a model one probe group before them."""
    over = threading.Event()

    def answer() -> None:
        while not pipeline.manifests():
            if over.wait(_LOOK_S):
                return
        if model is not None:
            said = _random_answer(0, 77, model)
            pipeline.write(TRAJECTORIES, *(pipeline.sample(0, index, purpose=Purpose.PROBE, **said) for index in range(GROUP_SIZE)))
        for seq in range(steps * GROUPS_PER_STEP):
            _write_group(pipeline, seq, model)

    worker = threading.Thread(target=answer, name="answers", daemon=True)
    worker.start()
    try:
        yield
    finally:
        over.set()
        worker.join()


def _write_group(pipeline: Pipeline, seq: int, model: Any) -> None:
    members = [pipeline.sample(seq, index, **_random_answer(seq, GROUP_SIZE * seq + index, model)) for index in range(GROUP_SIZE)]
    for member, where in zip(members, pipeline.write(TRAJECTORIES, *members), strict=True):
        pipeline.write_reward(member, where, float(member.index))


def _random_answer(seq: int, seed: int, model: Any) -> dict[str, Any]:
    """Random tokens after the prompt of `seq`, with the log-probabilities that `model` gives them; without a model, some."""
    random = np.random.default_rng(seed)
    end = NUM_PROMPT + NUM_GENERATED
    tokens = [*RandomPrompts().encode(str(seq)).tolist(), *random.integers(2, VOCABULARY, NUM_GENERATED).tolist()]
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


def train_to_file(folder: str, base: str, *, sections: Mapping[str, Any]) -> None:
    """Four steps in two sessions, and everything that they left in the log as a file, for another process."""
    pipeline = Pipeline(Path(folder), options=_with_base(sections, base, STEPS_TO_RETRAIN))
    with closing(open_trainer(trainer_config(pipeline.settings(), Path(base)), 1)) as trainer, _answers(pipeline, STEPS_TO_RETRAIN, None):
        for last in (2, STEPS_TO_RETRAIN):
            process = pipeline.process(learner={**pipeline.options["learner"], "steps": last})
            train_in_sessions(process, trainer, LearnerMetrics(process.registry), RandomPrompts(), StartOptions(takeover=True))
    messages = [
        {**asdict(kept), "topic": None, "key": _hex(kept.key), "value": _hex(kept.value), "headers": []} for kept in everything(pipeline)
    ]
    (Path(folder) / "log.json").write_text(json.dumps(messages), encoding="utf-8")


def retrain_from_file(
    folder: str, base: str, versions: str, *, sections: Mapping[str, Any], from_start: bool, ranks: int = 1
) -> dict[str, Any]:
    """The run of `train_to_file` trained again from its log: how each version compares."""
    content = json.loads((Path(folder) / "log.json").read_text(encoding="utf-8"))
    kept = tuple(Kept(**{**each, "key": _bytes(each["key"]), "value": _bytes(each["value"])}) for each in content)
    first = Pipeline(Path(folder), options=_with_base(sections, base, STEPS_TO_RETRAIN))
    pipeline = SoundRun(first, kept).forge(Path(folder), into=first)
    settings = pipeline.settings()
    with History(pipeline.bus, settings.run.name) as history:
        log = TrainingLog(history)
        plan = plan_retraining(log, pipeline.store, settings, parse_versions(versions), from_start=from_start)
        with closing(open_trainer(trainer_config(settings, Path(base)), ranks)) as trainer:
            parts = RetrainParts(
                settings=settings,
                store=pipeline.store,
                trainer=trainer,
                task=load_task(settings.task.name, settings.task.options),
                distance=partial(weight_distance, pipeline.bus),
                tolerance=0.02,
            )
            found = list(retrain(parts, log, plan))
    return {
        "start": plan.start,
        "sessions": len({report.session for report in log.reports.values()}),
        "versions": [asdict(version) for version in found],
    }


def _hex(data: bytes | None) -> str | None:
    return None if data is None else data.hex()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
