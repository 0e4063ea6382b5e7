"""A group of an evaluation: sampled under exactly the version that its request names, with the task of its evaluation.

On the worker's asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from echo_rollout.engines.engine import SnapshotRejected
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.generation import GroupPrompt, GroupSampler, Sample
from echo_rollout.older_snapshots import OlderSnapshots, VersionNotKept
from echo_rollout.weights.sources import SnapshotSource
from echo_schemas.records import RolloutRequest, WeightManifest
from echo_tasks.task import Task


class EvaluationSampler:
    """Samples evaluations. `close` it."""

    def __init__(
        self,
        engine: ExactVersions,
        source: SnapshotSource,
        folder: Path,
        *,
        manifest_of: Callable[[int], WeightManifest | None],
        tasks: Mapping[str, Task],
        own_task: Task,
        open_sampler: Callable[[Task], GroupSampler],
    ) -> None:
        """`source`, `folder`, `manifest_of`: as `OlderSnapshots`. `tasks` by the evaluation's name; other evaluations use `own_task`.
        `open_sampler`: on the bare engine inside `engine`.
        """
        self._engine = engine
        self._older = OlderSnapshots(source, folder, manifest_of=manifest_of, in_use=lambda: engine.in_use)
        self._tasks = tasks
        self._own_task = own_task
        self._open_sampler = open_sampler
        self._samplers: dict[str, GroupSampler] = {}

    async def sample(self, request: RolloutRequest, prompt: GroupPrompt) -> list[Sample]:
        """As `GroupSampler.sample`. Raises VersionNotKept besides."""
        version = request.required_version
        sampler = self._sampler(request.evaluation or "")
        if not self._engine.needs(version):
            async with self._engine.under(version, None) as is_exact:
                if is_exact:
                    return await sampler.sample(prompt)
        snapshot = await self._older.fetch(version)
        try:
            async with self._engine.under(version, snapshot):
                return await sampler.sample(prompt)
        except SnapshotRejected as exc:
            raise VersionNotKept(f"Version {version} is not served any more: {exc.message}") from exc
        finally:
            self._older.release(version)

    def close(self) -> None:
        self._older.close()
        for sampler in self._samplers.values():
            sampler.close()

    def _sampler(self, evaluation: str) -> GroupSampler:
        # A stranger's request may name any evaluation; those without a task share one sampler.
        name = evaluation if evaluation in self._tasks else ""
        if name not in self._samplers:
            self._samplers[name] = self._open_sampler(self._tasks.get(name, self._own_task))
        return self._samplers[name]
