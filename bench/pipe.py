"""The baseline of `overhead.py`, which starts it in the right environment: the same engine and trainer joined by a bare pipe. And that of
`recovery.py`: with the name of a role instead of a number of steps it only starts that role's engine or trainer, and ends.

No Kafka, no records, no reward process, no checkpoint.

    worker process (core 0): VllmInProcess ─ groups ─▶ pipe ─▶ learner process (core 1): DeepSpeedTrainer ─ adapter ─▶ pipe ─▶ worker

Admission is the pipeline's: issued groups ≤ (lead + p + 1) · groups per step. Rewards are computed by the worker.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from processor_time import cpu_s

from echo_core.advantages import group_advantages
from echo_core.normalisation import UpdateSplit
from echo_settings import Settings, load_settings

if TYPE_CHECKING:
    from echo_learner.training.ranks import RankedTrainer
    from echo_rollout.engines.engine import Engine

_WARM_UP = 10
# For the weights of all steps.
_ROOM_BYTES = 1 << 28

Group = tuple[list[int], list[tuple[list[int], list[float], int]], float]
"""Prompt, (tokens, log-probabilities, version) of each sample, right answers' share."""


def worker(settings: Settings, pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    """Generate until the pipe is closed; `folder` is for the weights."""
    asyncio.run(_work(settings, pipe, folder))


async def _started_engine(settings: Settings) -> Engine:
    from echo_rollout.engines.catalogue import open_engine
    from echo_rollout.engines.engine import EngineConfig
    from echo_schemas.records import WeightKind
    from echo_tasks.base_models import resolve_base

    base, kind = resolve_base(settings.policy.base), WeightKind(settings.policy.update)
    engine = open_engine(
        "vllm",
        EngineConfig(base=base, kind=kind, dtype="float32", max_length=64, lora_rank=settings.policy.lora.r, concurrency=512, options={}),
    )
    await engine.start()
    return engine


def _started_trainer(settings: Settings) -> RankedTrainer:
    from echo_learner.training.config import trainer_config
    from echo_learner.training.ranks import open_trainer
    from echo_tasks.base_models import resolve_base

    return open_trainer(trainer_config(settings, resolve_base(settings.policy.base)), 1)


async def _work(settings: Settings, pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    from tokenizers import Tokenizer

    from echo_rollout.engines.engine import Snapshot, SnapshotRef
    from echo_schemas.records import Sampling, WeightKind
    from echo_tasks.base_models import resolve_base
    from echo_tasks.catalogue import load_task

    base, task = resolve_base(settings.policy.base), load_task(settings.task.name)
    kind = WeightKind(settings.policy.update)
    engine = await _started_engine(settings)
    encode = Tokenizer.from_file(str(base / "tokenizer.json")).encode
    sampling = Sampling(max_new_tokens=settings.rollout.max_new_tokens, temperature=settings.rollout.temperature)
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    incoming: list[Any] = []

    def listen() -> None:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                message = None
            incoming.append(message)
            loop.call_soon_threadsafe(changed.set)
            if message is None:
                return

    threading.Thread(target=listen, daemon=True).start()
    published, issued = -1, 0
    slots = asyncio.Semaphore(settings.rollout.groups_in_flight)
    running: set[asyncio.Task[None]] = set()

    async def generate(seq: int) -> None:
        prompt = task.prompt(settings.run.seed, seq)
        ids = encode(prompt.text).ids
        found = await engine.generate(ids, settings.rollout.group_size, sampling)
        right = [float(g.text == prompt.entry["answer"]) for g in found]
        slots.release()
        pipe.send(([*ids], [(g.token_ids.tolist(), g.logprobs.tolist(), g.version_spans[0].version) for g in found], right))

    while True:
        while incoming:
            message = incoming.pop(0)
            if message is None:
                await engine.close()
                return
            published, files = message
            place = folder / str(published)
            place.mkdir()
            for name, content in files:
                (place / name).write_bytes(content)
            await engine.install(Snapshot(ref=SnapshotRef(version=published, sha256=str(published)), kind=kind, folder=place))
        limit = (settings.lead + published + 1) * settings.learner.groups_per_step if published >= 0 else 0
        if issued >= limit:
            changed.clear()
            if not incoming:
                await changed.wait()
            continue
        await slots.acquire()
        task_ = asyncio.create_task(generate(issued))
        running.add(task_)
        task_.add_done_callback(running.discard)
        issued += 1


def learn(settings: Settings, steps: int, folder: Path) -> dict[str, Any]:
    """Train `steps` steps; seconds per step over all but the first ten (as the pipeline's summary counts), CPU seconds
    of both processes over the same steps, and each step's mean reward. The worker keeps its weights in `folder`."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(settings, theirs, folder), daemon=True)
    process.start()
    theirs.close()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    trainer = _started_trainer(settings)
    groups: list[Any] = []
    arrived = threading.Condition()

    def read() -> None:
        while True:
            try:
                group = ours.recv()
            except (EOFError, OSError):
                return
            with arrived:
                groups.append(group)
                arrived.notify()

    def publish(version: int) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            snapshot = trainer.snapshot(version, Path(scratch) / "snapshot")
            ours.send((version, [(file.name, snapshot.path(file).read_bytes()) for file in snapshot.files]))

    publish(0)
    threading.Thread(target=read, daemon=True).start()
    size, times, rewards = settings.learner.groups_per_step, [time.monotonic()], []
    cpu: dict[str, float] = {}
    for version in range(steps):
        with arrived:
            arrived.wait_for(lambda: len(groups) >= size)
            batch, groups[:] = groups[:size], groups[size:]
        rewards.append(float(np.mean([value for group in batch for value in group[2]])))
        trainer.step(_training_batch(batch, version, settings))
        if (version + 1) % settings.publication_period == 0:
            publish(version + 1)
        times.append(time.monotonic())
        if len(times) - 1 in {_WARM_UP, steps}:
            used = {"worker": cpu_s(process.pid or 0), "learner": time.process_time()}
            cpu = {role: seconds - cpu.get(role, 0.0) for role, seconds in used.items()}
    ours.close()
    process.kill()
    process.join()
    steady = np.diff(times)[_WARM_UP:]
    return {"s_per_step": float(steady.mean()), "cpu_s": cpu, "rewards": [round(reward, 3) for reward in rewards]}


def _training_batch(batch: list[Any], version: int, settings: Settings) -> Any:
    from echo_learner.training.batch import TrainingBatch
    from echo_learner.training.microbatches import plan_micro_batches

    samples = [(prompt, tokens, logprobs) for prompt, members, _ in batch for tokens, logprobs, _ in members]
    advantages = np.concatenate([group_advantages(np.array(right)) for _, _, right in batch]).astype(np.float32)
    lengths = np.array([len(prompt) + len(tokens) for prompt, tokens, _ in samples], np.int64)
    num_generated = np.array([len(tokens) for _, tokens, _ in samples], np.int64)
    plan = plan_micro_batches(
        lengths.tolist(),
        [len(members) for _, members, _ in batch],
        num_updates=settings.learner.updates_per_step,
        max_tokens=settings.learner.micro_batch_tokens,
        split=UpdateSplit(settings.learner.split),
    )
    rows = int(num_generated.sum())
    return TrainingBatch(
        version=version,
        tokens=np.concatenate([[*prompt, *tokens] for prompt, tokens, _ in samples]).astype(np.int32),
        lengths=lengths,
        generated=np.concatenate([np.arange(len(prompt) + len(tokens)) >= len(prompt) for prompt, tokens, _ in samples]),
        num_generated=num_generated,
        sampler=np.concatenate([logprobs for _, _, logprobs in samples]).astype(np.float32),
        advantages=np.repeat(advantages, num_generated),
        mask=np.ones(rows, np.bool_),
        fresh=np.zeros(rows, np.bool_),
        order=plan.order,
        micro_batch_sizes=plan.micro_batch_sizes,
        update_sizes=plan.update_sizes,
    )


def main() -> None:
    """`pipe.py FILE.toml STEPS`, or `pipe.py FILE.toml worker` or `learner`."""
    settings, what = load_settings(Path(sys.argv[1]), {}), sys.argv[2]
    if what == "worker":
        asyncio.run(_started_engine(settings))
    elif what == "learner":
        _started_trainer(settings)
    else:
        from echo_rollout.snapshot_folders import snapshot_folder

        # Here and not in the worker, which is killed at the end: its files would stay in shared memory.
        with snapshot_folder(_ROOM_BYTES) as folder:
            sys.stdout.write(json.dumps(learn(settings, int(what), folder)) + "\n")
        return
    sys.stdout.write("started\n")
    sys.stdout.flush()
    # Nothing is worth the time of an orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
