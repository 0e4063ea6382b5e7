"""The process of the offline route: `run_offline` reads a file of episodes and puts them into the run's log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from echo_rollout.metrics import OfflineMetrics
from echo_rollout.offline.episodes import Episode, EpisodeFile, EpisodeRefused, Skipped, into_groups, read_episodes
from echo_rollout.offline.producer import Group, OfflineProducer, Schedule
from echo_rollout.offline.rendering import ChatWording, ModelLimits, PlainWording, RenderedEpisode, render_episode
from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS
from echo_settings import Settings
from echo_settings.rules import staleness_policy
from echo_tasks.base_models import resolve_base
from echo_tasks.prompts import PromptCodec, end_tokens, vocabulary_size

logger = logging.getLogger(__name__)

# Skipped lines that are logged one by one; the counts by reason follow them.
_MAX_NAMED = 20


def run_offline(process: RoleProcess, *, episodes: Path | None = None) -> None:
    """Put the groups of the file `episodes`, or of [offline] episodes, into the log as often as [offline] epochs says, then end.

    Raises UserError in sequential mode, without [offline] episodes or for a file without a group that can be trained, and when another
    allocator takes the run over.
    """
    settings = process.settings
    offline = settings.offline
    if episodes is None and not offline.episodes:
        raise UserError("No episodes are named.", hint="Give --episodes FILE, or set [offline] episodes; docs/offline.md shows the format.")
    if settings.run.mode != "asynchronous":
        raise UserError(
            "Logged episodes are no answer to the request of a sequential learner.", hint='Set [run] mode = "asynchronous" for this run.'
        )
    if not offline.episodes:
        raise UserError(
            "The learner takes logged episodes only if the run's file sets [offline] episodes.",
            hint="Set [offline] episodes in the file of this run, for the learner too; --episodes may name another file.",
        )
    metrics = OfflineMetrics(process.registry)
    file = read_episodes(episodes or Path(offline.episodes))
    groups = load_groups(file, settings, metrics)
    bus = process.bus
    with ExitStack() as stack:
        producer = OfflineProducer(
            settings=settings,
            policy=staleness_policy(settings),
            groups=groups,
            schedule=Schedule(num_groups=len(groups), epochs=offline.epochs, seed=settings.run.seed, first_seq=offline.first_seq),
            file=file.name,
            sha256=file.sha256,
            bus=bus,
            writer=stack.enter_context(closing(bus.transactions("feeder"))),
            progress=stack.enter_context(closing(bus.view(PROGRESS, Progress))),
            control=stack.enter_context(closing(bus.orders())),
            metrics=metrics,
            clock=process.clock,
        )
        producer.run(process.stop)


def load_groups(file: EpisodeFile, settings: Settings, metrics: OfflineMetrics) -> list[Group]:
    """The groups that can be trained; the others' lines are logged and counted. Raises UserError if there is none."""
    base = resolve_base(settings.policy.base)
    codec = PromptCodec(base)
    wording = PlainWording(codec, end_tokens(base)[0]) if settings.offline.plain else ChatWording(codec)
    limits = ModelLimits(vocabulary=vocabulary_size(base), max_length=settings.policy.max_length)
    rendered: dict[int, RenderedEpisode] = {}
    fitting: list[Episode] = []
    skipped = list(file.skipped)
    for episode in file.episodes:
        try:
            rendered[episode.line] = render_episode(episode, wording, codec, limits)
            fitting.append(episode)
        except EpisodeRefused as exc:
            skipped.append(Skipped(line=episode.line, reason=exc.reason, detail=exc.message))
    groups, alone = into_groups(fitting, settings.rollout.group_size)
    skipped += alone
    _report(file.name, skipped, metrics)
    if not groups:
        first = min(skipped, key=lambda each: each.line, default=None)
        why = "It is empty." if first is None else f"Line {first.line}: {first.detail}"
        raise UserError(f"{file.name} holds no group of episodes that can be trained. {why}", hint="docs/offline.md shows the format.")
    logger.info("%s: %d groups of %d episodes, %d skipped", file.name, len(groups), sum(map(len, groups)), len(skipped))
    return [tuple(rendered[episode.line] for episode in group) for group in groups]


def _report(name: str, skipped: Iterable[Skipped], metrics: OfflineMetrics) -> None:
    found = sorted(skipped, key=lambda each: each.line)
    for each in found[:_MAX_NAMED]:
        logger.warning("%s, line %d is skipped (%s): %s", name, each.line, each.reason.value, each.detail)
    for reason, count in Counter(each.reason for each in found).items():
        metrics.skipped.labels(reason.value).inc(count)
        if len(found) > _MAX_NAMED:
            logger.warning("%s: %d episodes are skipped in all for the reason %s", name, count, reason.value)
