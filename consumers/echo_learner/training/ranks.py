"""One reading rank that feeds the others: the trainer over several processes.

    rank 0 (the learner) ─ command and arrays over gloo ─▶ ranks 1 … N−1: obey, in the same order, until `close`

The learner starts the other ranks on this machine, or finds itself started by a launcher (`torchrun`) that set RANK and WORLD_SIZE.
Commands travel as JSON and numpy arrays, never as pickles. A rank whose learner is gone ends, because its next receive fails.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from echo_bus.clock import Deadline
from echo_core.normalisation import Normalisation
from echo_embedded.guard import Guard
from echo_embedded.ports import free_ports
from echo_learner.commit.checkpoint import sync_tree
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.losses.config import ReferenceKl
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.cut import Cut
from echo_learner.training.deepspeed_setup import OptimizerConfig, RankPlace
from echo_learner.training.policy_model import PolicyConfig
from echo_learner.training.trainer import DeepSpeedTrainer, TrainerConfig, TrainingDiverged, TrainResult
from echo_runtime.logs import set_up_logs_as_parent
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

logger = logging.getLogger(__name__)

_CONFIG_VARIABLE = "ECHO_TRAINER_CONFIG"
# A rank waits for its next command as long as the learner waits for rollouts.
_PATIENCE = timedelta(days=30)
_END_S = 30.0
_CLOSE_S = 5.0
# A rank that a collective misses has ended, or is about to.
_NOTICE_S = 10.0
_LOOK_EVERY_S = 0.05


class Trainer(Protocol):
    """What the learner trains with; see `DeepSpeedTrainer` for each method."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def experts(self) -> tuple[int, int, int] | None: ...
    @property
    def remembered(self) -> Collection[int]: ...
    def step(self, batch: TrainingBatch) -> TrainResult: ...
    def snapshot(self, version: int, folder: Path) -> SnapshotFiles: ...
    def remember(self, version: int, at_most: int) -> None: ...
    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[npt.NDArray[np.float32]]: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def load_weights(self, folder: Path) -> None: ...
    def close(self) -> None: ...


class RankedTrainer:
    """The learner's end: every collective call is told to the other ranks first. With one rank it tells nobody."""

    def __init__(self, local: DeepSpeedTrainer, place: RankPlace, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self._local = local
        # However this process ends, and some collectives wait for a dead peer for long.
        self._guard = Guard() if children else None
        for child in children:
            if self._guard is not None:
                self._guard.protect(child.pid)
        self._children = children
        self._channel = _Channel() if place.world_size > 1 else None
        self._closed = False

    @property
    def vocabulary(self) -> int:
        """Token ids below it exist."""
        return self._local.vocabulary

    @property
    def experts(self) -> tuple[int, int, int] | None:
        """See `DeepSpeedTrainer`."""
        return self._local.experts

    @property
    def remembered(self) -> Collection[int]:
        """The versions that `logprobs_under` knows."""
        return self._local.remembered

    def step(self, batch: TrainingBatch) -> TrainResult:
        """Train one step on all ranks."""
        with self._ranks_watched():
            self._tell("step", {"version": batch.version}, batch.arrays())
            return self._local.step(batch)

    def snapshot(self, version: int, folder: Path) -> SnapshotFiles:
        """The weights as files in the new folder `folder`."""
        with self._ranks_watched():
            self._tell("snapshot", {"version": version, "folder": str(folder)})
            found = self._local.snapshot(version, folder)
        assert found is not None
        return found

    def remember(self, version: int, at_most: int) -> None:
        """Keep a copy of what is trained as the weights of `version`, on all ranks."""
        with self._ranks_watched():
            self._tell("remember", {"version": version, "at_most": at_most})
            self._local.remember(version, at_most)

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[npt.NDArray[np.float32]]:
        """Log-probabilities under a remembered version, a part of them from each rank."""
        with self._ranks_watched():
            self._tell("logprobs_under", {"version": version}, batch.arrays())
            return self._local.logprobs_under(version, batch)

    def save(self, folder: Path) -> None:
        """Write every rank's state below `folder`; all have written when this returns."""
        with self._ranks_watched():
            self._tell("save", {"folder": str(folder)})
            self._local.save(folder)
            if self._channel is not None:
                self._channel.barrier()

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on all ranks."""
        with self._ranks_watched():
            self._tell("load", {"folder": str(folder)})
            self._local.load(folder)

    def load_weights(self, folder: Path) -> None:
        """Begin from a snapshot's files with a fresh optimizer, on all ranks."""
        with self._ranks_watched():
            self._tell("load_weights", {"folder": str(folder)})
            self._local.load_weights(folder)

    def close(self) -> None:
        """End the other ranks, however they are. Idempotent."""
        if self._closed:
            return
        self._closed = True
        patience_s = _END_S
        try:
            self._tell("close", {}, patience=timedelta(seconds=_CLOSE_S))
        except RuntimeError as exc:
            # Gone, or stuck in something that this rank has left.
            logger.warning("The other ranks do not hear that this one closes: %s", exc)
            patience_s = 0.0
        self._local.close()
        for child in self._children:
            try:
                child.wait(patience_s)
            except subprocess.TimeoutExpired:
                logger.warning("Rank process %d does not end and is killed", child.pid)
                child.kill()
                child.wait()
            if self._guard is not None:
                self._guard.release(child.pid)
        if self._guard is not None:
            self._guard.close()

    def _tell(
        self,
        command: str,
        arguments: Mapping[str, Any],
        arrays: Mapping[str, npt.NDArray[Any]] | None = None,
        patience: timedelta = _PATIENCE,
    ) -> None:
        if self._channel is not None:
            self._channel.send({"command": command, **arguments}, arrays or {}, patience)

    @contextmanager
    def _ranks_watched(self) -> Iterator[None]:
        """A collective fails when a rank is gone, and says nothing of why. Raises UserError instead, with the rank and its exit code."""
        try:
            yield
        except RuntimeError as exc:
            gone = self._gone_rank(Deadline.after(_NOTICE_S))
            if gone is None:
                raise
            rank, child = gone
            raise UserError(
                f"Rank {rank} of the trainer (process {child.pid}) has ended with exit code {child.returncode}.",
                hint="Its last words are in the learner's log; -9 mostly means that memory ran out. Start again: the run goes on.",
            ) from exc

    def _gone_rank(self, deadline: Deadline) -> tuple[int, subprocess.Popen[bytes]] | None:
        """A rank that ends before the deadline; None if all of them live on."""
        while self._children:
            for rank, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    return rank, child
            if deadline.expired():
                break
            time.sleep(_LOOK_EVERY_S)
        return None


def open_trainer(config: TrainerConfig, num_ranks: int) -> RankedTrainer:
    """The trainer on rank 0 and `num_ranks` − 1 further processes of this machine (or those of a launcher). Raises UserError."""
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    place = _launched_place() if launched else RankPlace(rank=0, world_size=num_ranks, port=free_ports(1)[0])
    children = [] if launched else [_start_rank(config, place, rank) for rank in range(1, place.world_size)]
    try:
        return RankedTrainer(DeepSpeedTrainer(config, place), place, children)
    except BaseException:  # whatever it is: ranks without a learner must not stay
        for child in children:
            child.kill()
            child.wait()
        raise


def is_follower() -> bool:
    """Whether a launcher made this process another rank than the learner."""
    return int(os.environ.get("RANK", "0")) > 0


def follow(config: TrainerConfig) -> None:
    """Be a rank that obeys, until the learner closes."""
    place = _launched_place()
    trainer = DeepSpeedTrainer(config, place)
    channel = _Channel()
    while True:
        command, arrays = channel.receive()
        match command["command"]:
            case "step":
                try:
                    trainer.step(TrainingBatch(version=command["version"], **arrays))
                except TrainingDiverged as exc:
                    # Every rank sees it at once, and the learner decides.
                    logger.warning("%s", exc)
            case "snapshot":
                trainer.snapshot(command["version"], Path(command["folder"]))
            case "remember":
                trainer.remember(command["version"], command["at_most"])
            case "logprobs_under":
                trainer.logprobs_under(command["version"], TrainingBatch(version=command["version"], **arrays))
            case "save":
                trainer.save(Path(command["folder"]))
                # The learner's own machine may not be the one that has to write this out.
                sync_tree(Path(command["folder"]))
                channel.barrier()
            case "load":
                trainer.load(Path(command["folder"]))
            case "load_weights":
                trainer.load_weights(Path(command["folder"]))
            case _:
                trainer.close()
                return


class _Channel:
    """Commands from rank 0 to all, over a group of its own that never times out and works beside any accelerator's."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, command: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], patience: timedelta) -> None:
        """Raises RuntimeError if a rank is gone or does not listen for so long."""
        packed = io.BytesIO()
        text = np.frombuffer(json.dumps(command).encode(), np.uint8)
        np.savez(packed, allow_pickle=False, command=text, **arrays)
        data = torch.frombuffer(bytearray(packed.getbuffer()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(data)]), data):
            work = dist.broadcast(tensor, 0, group=self._group, async_op=True)
            assert work is not None
            work.wait(patience)

    def receive(self) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        with np.load(io.BytesIO(data.numpy().tobytes()), allow_pickle=False) as packed:
            arrays = {name: packed[name] for name in packed.files}
        command: dict[str, Any] = json.loads(arrays.pop("command").tobytes())
        return command, arrays

    def barrier(self) -> None:
        """Until all ranks are here."""
        dist.barrier(group=self._group)


def _launched_place() -> RankPlace:
    environ = os.environ
    return RankPlace(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
    )


def _start_rank(config: TrainerConfig, first: RankPlace, rank: int) -> subprocess.Popen[bytes]:
    place = RankPlace(rank=rank, world_size=first.world_size, port=first.port, local_rank=rank)
    environment = {**os.environ, **place.environment(), _CONFIG_VARIABLE: json.dumps(asdict(config))}
    return subprocess.Popen([sys.executable, "-m", "echo_learner.training.ranks"], env=environment)


def _config_from(text: str) -> TrainerConfig:
    content = json.loads(text)
    policy = content.pop("policy")
    return TrainerConfig(
        policy=PolicyConfig(**{**policy, "kind": WeightKind(policy["kind"]), "cut": Cut(**policy["cut"])}),
        optimizer=OptimizerConfig(**content.pop("optimizer")),
        kl=ReferenceKl(**content.pop("kl")),
        normalisation=Normalisation(content.pop("normalisation")),
        **content,
    )


if __name__ == "__main__":
    set_up_logs_as_parent()
    follow(_config_from(os.environ[_CONFIG_VARIABLE]))
