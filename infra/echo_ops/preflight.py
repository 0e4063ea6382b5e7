"""The mistakes in a run's file that can be found before anything starts: all of them at once, one sentence each.

`examine` starts nothing and changes nothing. `quickly` leaves out the checks that take seconds: the chat template, calls of the rewards,
and the cluster. A warning is a note.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_core.needs.amounts import size
from echo_core.needs.memory import ITEM_BYTES, STATE_BYTES
from echo_learner.commit.placement import expected_bytes
from echo_learner.losses.catalogue import parse_loss
from echo_learner.losses.config import CustomLoss
from echo_learner.training.zero import check_compile
from echo_ops.estimate import disk_of, trained_weights, zero_stage
from echo_ops.supervisor.broker import given_bootstrap
from echo_ops.supervisor.placement import this_machine
from echo_ops.supervisor.plan import signing_processes
from echo_ops.surroundings import ask_registry, existing_part, memory_bytes
from echo_ops.topic_admin import TopicAdmin
from echo_ops.trial_call import why_no_score
from echo_rollout.engines.catalogue import check_devices, check_engine, check_promises
from echo_rollout.engines.engine import check_prompt
from echo_rollout.engines.pipeline import plan_split
from echo_rollout.price import read_price
from echo_rollout.weights.peers.opening import tls_contexts
from echo_runtime.opening import open_cluster
from echo_runtime.trust import open_signer, open_verifier
from echo_schemas.errors import EchoError, UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import FinishReason
from echo_settings import Settings
from echo_settings.kinds import kinds_of
from echo_settings.rules import evaluation_specs, training_sampling
from echo_streams.run import all_rewards, attach, check_isolation
from echo_tasks.base_models import is_made, resolve_base
from echo_tasks.catalogue import import_object, load_evaluation_tasks, load_task
from echo_tasks.prompts import PromptCodec, check_positions, check_template, vocabulary_size
from echo_tasks.rewards import ScoredSample
from echo_tasks.task import Prompt

_REACH_S = 3.0
# Of an update. With four whole groups the laboratory saw less learnt, with sixteen no difference: docs/learning.md.
_MANY_GROUPS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, and how to correct it; or, `is_note`, a warning."""

    message: str
    hint: str = ""
    is_note: bool = False


def examine(settings: Settings, *, quickly: bool = False) -> Iterator[Problem]:
    """Every finding, in the order of the checks."""
    for look in (
        _base,
        _task,
        _loss,
        _rate,
        _staleness,
        _engines,
        _money,
        _rewards,
        _evaluations,
        _offline,
        _weights,
        _folders,
        _memory,
        _trust,
    ):
        yield from _guarded(look, settings)
    if not quickly:
        for look in (_prompt_fits, _reward_calls, _cluster, _registry):
            yield from _guarded(look, settings)


def refuse_unsound(settings: Settings) -> None:
    """Raise UserError with every mistake that `examine` finds quickly."""
    found = [finding for finding in examine(settings, quickly=True) if not finding.is_note]
    if found:
        hints = dict.fromkeys(finding.hint for finding in found if finding.hint)
        raise UserError(" ".join(finding.message for finding in found), hint=" ".join(hints))


def _guarded(look: Callable[[Settings], Iterator[Problem] | None], settings: Settings) -> Iterator[Problem]:
    """The findings of `look`; an EchoError that it raises is one."""
    try:
        yield from look(settings) or ()
    except EchoError as exc:
        yield Problem(exc.message, exc.hint)


def _base(settings: Settings) -> Iterator[Problem]:
    if not is_made(settings.policy.base):
        yield Problem(f"The base model {settings.policy.base} is made at the first start, which takes some seconds.", is_note=True)
        return
    folder = resolve_base(settings.policy.base)
    vocabulary_size(folder)
    check_positions(folder, settings.policy.max_length)
    if not list(folder.glob("*.safetensors")):
        yield Problem(f"{folder} has no weights in safetensors files.", "Save the model with `save_pretrained`.")


def _folder_of_base(settings: Settings) -> Path | None:
    """None for a base that is not made yet, or is missing, which `_base` says."""
    try:
        return resolve_base(settings.policy.base) if is_made(settings.policy.base) else None
    except UserError:
        return None


def _first_prompt(settings: Settings) -> Prompt:
    """The prompt of seq 0. Raises UserError for a task that cannot make it."""
    task = load_task(settings.task.name, settings.task.options)
    try:
        prompt = task.prompt(settings.run.seed, 0)
        json.dumps(dict(prompt.entry))
        task.environment(prompt.entry)
    except Exception as exc:  # a task is the user's code and may raise anything
        raise UserError(f"The task {settings.task.name!r} cannot make its first prompt: {type(exc).__name__}: {exc}") from exc
    return prompt


def _task(settings: Settings) -> None:
    prompt, folder = _first_prompt(settings), _folder_of_base(settings)
    if folder is not None:
        check_template(folder, prompt)


def _prompt_fits(settings: Settings) -> Iterator[Problem]:
    """The first prompt in the model's tokens, with room for an answer. Other checks report mistakes in task or model."""
    folder = _folder_of_base(settings)
    if folder is None:
        return
    try:
        prompt = _first_prompt(settings)
        vocabulary = vocabulary_size(folder)
        check_template(folder, prompt)
    except UserError:
        return
    codec = PromptCodec(folder)
    text = codec.render(prompt.messages) if prompt.messages else prompt.text
    token_ids = codec.encode(text).tolist()
    if num_unknown := codec.num_unknown(text):
        yield Problem(
            f"{settings.policy.base} has no token for {num_unknown} of the {len(token_ids)} pieces of the task's first prompt.",
            "Choose a task that this model was made for (docs/tasks.md), or another [policy] base.",
        )
    check_prompt(token_ids, training_sampling(settings.rollout), vocabulary=vocabulary, max_length=settings.policy.max_length)


def _loss(settings: Settings) -> Iterator[Problem]:
    loss = parse_loss(settings.learner.loss, settings.learner.loss_options)
    if isinstance(loss, CustomLoss) and not callable(import_object(loss.path)):
        yield Problem(f"[learner] loss {loss.path!r} is no function.")
    learner = settings.learner
    groups = learner.groups_per_step // learner.updates_per_step
    if learner.updates_per_step > 1 and learner.split == "groups" and groups < _MANY_GROUPS:
        message = f"An update gets {groups} whole groups; where it was tried, so few taught less than samples of all groups of the step."
        yield Problem(message, 'Try [learner] split = "samples", or more groups_per_step.', is_note=True)
    if learner.compile:
        message = "The first step of each start compiles the model's layers and takes longer: a minute on a GPU, several on a CPU."
        yield Problem(message, is_note=True)
    check_compile(is_wanted=learner.compile, stage=zero_stage(learner.deepspeed))


def _rate(settings: Settings) -> Iterator[Problem]:
    """What the run's number of updates makes of the rate."""
    learner = settings.learner
    updates = learner.steps * learner.updates_per_step
    if 0 < updates <= learner.warmup_steps:
        yield Problem(
            f"[learner] warmup_steps = {learner.warmup_steps} is no shorter than the run of {updates} updates: its rate never reaches lr.",
            "Write fewer warmup_steps.",
            is_note=True,
        )
    if learner.decay_steps is not None and 0 < updates < learner.decay_steps:
        yield Problem(
            f"[learner] decay_steps = {learner.decay_steps}, and the run ends after {updates} updates: its rate does not fall to its end.",
            f"Write decay_steps = {updates}, if it should.",
            is_note=True,
        )


def _staleness(settings: Settings) -> Iterator[Problem]:
    staleness = settings.staleness
    if settings.run.mode != "sequential" and staleness.admission == "free" and staleness.over_budget == "downweight":
        message = (
            "Samples of any age are trained, and nothing holds the workers back: where they make more than is trained, samples grow older "
            "to the end of the run, and teach less and less."
        )
        yield Problem(message, 'Write [staleness] admission = "pace", or over_budget = "drop".', is_note=True)


def _engines(settings: Settings) -> None:
    base = _folder_of_base(settings)
    for _, kind in kinds_of(settings):
        rollout = kind.rollout
        check_engine(rollout.engine, rollout.options)
        check_devices(rollout.engine, rollout.devices)
        check_promises(rollout.engine, rollout, base)
        if rollout.devices and base is not None:
            plan_split(base, settings.policy.dtype, tuple(each.device() for each in rollout.devices))


def _money(settings: Settings) -> Iterator[Problem]:
    """Prices in files on this machine, and the numbers that the coordinator needs."""
    kinds = kinds_of(settings)
    for _, kind in kinds:
        if kind.rollout.price_file and kind.rollout.workers:
            read_price(Path(kind.rollout.price_file))
    if not settings.coordinator.enabled:
        return
    unpriced = [name or "[rollout]" for name, kind in kinds if not (kind.rollout.price_per_hour or kind.rollout.price_file)]
    if unpriced:
        yield Problem(
            f"Without a price {', '.join(unpriced)} count as free: the coordinator releases them after all others, the slowest first.",
            "Write price_per_hour or price_file.",
            is_note=True,
        )
    if settings.coordinator.machines == "metric" and not any(kind.most_workers for kind in settings.rollout.pool):
        yield Problem(
            '[coordinator] machines = "metric" needs workers that an autoscaler starts, and no kind says how many it may start.',
            "Write most_workers in a [[rollout.pool]].",
        )


def _rewards(settings: Settings) -> None:
    check_isolation(attach(all_rewards(settings)), settings.scoring.processes)


def _reward_calls(settings: Settings) -> Iterator[Problem]:
    """Call each reward once with the first prompt, and the entry's `answer` as the completion."""
    try:
        prompt, attached = _first_prompt(settings), attach(all_rewards(settings))
    except UserError:
        return
    words = prompt.text or "\n".join(message.content for message in prompt.messages)
    sample = ScoredSample(
        prompt=words,
        completion=str(prompt.entry.get("answer", "")),
        entry=prompt.entry,
        token_ids=np.zeros(2, np.int32),
        num_generated=1,
        turn_rewards=(0.0,),
        finish_reason=FinishReason.STOP,
        metadata={},
        task=settings.task.name,
    )
    for entry in attached:
        why = why_no_score(entry.function, sample)
        if why:
            yield Problem(f"The reward {entry.name!r}, called with a made-up sample, {why}", is_note=True)


def _evaluations(settings: Settings) -> None:
    load_evaluation_tasks(evaluation_specs(settings))


def _offline(settings: Settings) -> Iterator[Problem]:
    episodes = settings.offline.episodes
    if episodes and not Path(episodes).is_file():
        yield Problem(f"[offline] episodes names {episodes}, and there is no such file.")


def _weights(settings: Settings) -> Iterator[Problem]:
    weights = settings.weights
    if not weights.may_pass_on:
        return
    num_workers = sum(kind.rollout.workers for _, kind in kinds_of(settings))
    if weights.port and num_workers > 1:
        yield Problem(
            f"[weights] port = {weights.port} serves one worker, and {num_workers} are started on this machine.", "Write port = 0."
        )
    if num_workers:
        tls_contexts(settings)


def _folders(settings: Settings) -> Iterator[Problem]:
    folder = Path(settings.checkpoint.folder).absolute()
    existing = existing_part(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Problem(f"[checkpoint] folder {folder} cannot be made or written.", "Choose another one.")
        return
    yield from _room(settings, existing, folder)
    if settings.store.uri:
        import fsspec

        try:
            fsspec.core.url_to_fs(settings.store.uri)
        except Exception as exc:  # a driver may raise anything, also at its import
            yield Problem(f"[store] uri {settings.store.uri} cannot be opened: {exc}.", "Install the fsspec driver that it names.")


def _room(settings: Settings, existing: Path, folder: Path) -> Iterator[Problem]:
    """Whether the checkpoints of the run fit, beside those that `folder` has already. Another check reports a bad DeepSpeed file."""
    try:
        disk = disk_of(settings, _trained_weights(settings))
    except UserError:
        return
    free, needed = shutil.disk_usage(existing).free, disk.room_needed(_checkpoint_bytes(folder))
    if free < needed:
        yield Problem(
            f"{existing} has {size(free)} left, and the run's checkpoints take {size(needed)} more: {disk.checkpoints} lie "
            f"there at once, each of {size(disk.one.total)} at most.",
            "Free space there, lower [checkpoint] keep, or set [checkpoint] folder.",
        )


def _checkpoint_bytes(folder: Path) -> int:
    """Bytes of the checkpoints in `folder`, and of the snapshots beside them; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for top in (*folder.glob("v[0-9]*-*"), folder / "snapshots"):
        for below, _, names in os.walk(top):
            for name in names:
                # A running learner may remove it meanwhile.
                with suppress(FileNotFoundError):
                    found = (Path(below) / name).stat()
                    sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _memory(settings: Settings) -> Iterator[Problem]:
    if this_machine().gpus or settings.policy.update != "full":
        return
    needed = _trained_weights(settings) * STATE_BYTES[settings.policy.dtype]
    there = memory_bytes()
    if needed > there:
        yield Problem(
            f"The learner takes about {size(needed)} to train all weights, and this machine has {size(there)}.",
            'Set [policy] update = "lora", or start the learner elsewhere.',
            is_note=True,
        )


def _trained_weights(settings: Settings) -> int:
    """As the model's shape says, else its files of weights; 0 if it is unknown."""
    try:
        return trained_weights(settings)
    except UserError:
        pass
    try:
        return expected_bytes(settings) // ITEM_BYTES[settings.policy.dtype] if is_made(settings.policy.base) else 0
    except UserError:
        return 0


def _trust(settings: Settings) -> Iterator[Problem]:
    """The keys of the processes that `up` would start here."""
    for process in signing_processes(settings):
        try:
            open_signer(settings.trust, process)
        except UserError as exc:
            yield Problem(exc.message, exc.hint)
    open_verifier(settings.trust, "learner")
    if settings.trust.signatures == "required" and not settings.trust.keys:
        yield Problem("[trust] requires signatures, and keys names no folder: records written from here are refused.", is_note=True)


def _cluster(settings: Settings) -> Iterator[Problem]:
    if given_bootstrap(settings.kafka.bootstrap) is None:
        yield Problem("No Kafka is named and none runs here: `echoswarm up` starts one for the run.", is_note=True)
        return
    cluster = open_cluster(settings)
    cluster.check(_REACH_S)
    plan = TopicAdmin(cluster, Namespace(settings.kafka.namespace), replicas=settings.kafka.replicas).plan()
    for step in plan.refused:
        yield Problem(f"The topic {step.topic} has {step.what} = {step.before}, and the files say {step.after}.", step.why)
    if len(plan.refused) < len(plan.steps):
        yield Problem(
            f"{len(plan.steps)} topics or settings are not as the files say yet.", "`echoswarm topics plan` shows them.", is_note=True
        )


def _registry(settings: Settings) -> None:
    if settings.registry.url:
        ask_registry(settings)
