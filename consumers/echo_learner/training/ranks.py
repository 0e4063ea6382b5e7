"""The trainer over several processes: rank 0 reads the batches and sends them to the others.

    rank 0 (the learner) ─ command and arrays over gloo ─▶ ranks 1 … N−1: obey, in the same order, until `close`

The learner starts the other ranks on this machine, or was started by a launcher (`torchrun`) that set RANK and WORLD_SIZE.
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
from pydantic import TypeAdapter

from echo_bus.clock import Deadline
from echo_embedded.guard import Guard
from echo_embedded.ports import free_ports
from echo_learner.commit.fsync import sync_tree
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.deepspeed_setup import RankPlace
from echo_learner.training.trainer import DeepSpeedTrainer, TrainerConfig, TrainingDiverged, TrainResult
from echo_runtime.logs import set_up_logs_as_parent
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_CONFIG_VARIABLE = "ECHO_TRAINER_CONFIG"
_CLOSE = "close"
# A rank waits for its next command as long as the learner waits for rollouts.
_PATIENCE = timedelta(days=30)
_END_S = 30.0
_CLOSE_S = 5.0
# Seconds after a failed collective in which a rank's end is looked for.
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
    """The trainer on rank 0: every collective call is sent to the other ranks first, if there are any. See `DeepSpeedTrainer`."""

    def __init__(self, local: DeepSpeedTrainer, place: RankPlace, children: Sequence[subprocess.Popen[bytes]] = ()) -> None:
        self._local = local
        # Ends the ranks however this process ends: some collectives wait long for a dead peer.
        self._guard = Guard() if children else None
        for child in children:
            if self._guard is not None:
                self._guard.protect(child.pid)
        self._children = children
        self._channel = _Channel() if place.world_size > 1 else None
        self._closed = False

    @property
    def vocabulary(self) -> int:
        return self._local.vocabulary

    @property
    def experts(self) -> tuple[int, int, int] | None:
        return self._local.experts

    @property
    def remembered(self) -> Collection[int]:
        return self._local.remembered

    def step(self, batch: TrainingBatch) -> TrainResult:
        result: TrainResult = self._on_all_ranks("step", batch)
        return result

    def snapshot(self, version: int, folder: Path) -> SnapshotFiles:
        found: SnapshotFiles = self._on_all_ranks("snapshot", version=version, folder=str(folder))
        return found

    def remember(self, version: int, at_most: int) -> None:
        self._on_all_ranks("remember", version=version, at_most=at_most)

    def logprobs_under(self, version: int, batch: TrainingBatch) -> Sequence[npt.NDArray[np.float32]]:
        found: Sequence[npt.NDArray[np.float32]] = self._on_all_ranks("logprobs_under", batch, version=version)
        return found

    def save(self, folder: Path) -> None:
        self._on_all_ranks("save", folder=str(folder))
        if self._channel is not None:
            with self._ranks_watched():
                self._channel.barrier()

    def load(self, folder: Path) -> None:
        self._on_all_ranks("load", folder=str(folder))

    def load_weights(self, folder: Path) -> None:
        self._on_all_ranks("load_weights", folder=str(folder))

    def close(self) -> None:
        """End the other ranks, also those that do not answer. Idempotent."""
        if self._closed:
            return
        self._closed = True
        patience_s = _END_S
        try:
            if self._channel is not None:
                self._channel.send({"command": _CLOSE}, {}, timedelta(seconds=_CLOSE_S))
        except RuntimeError as exc:
            # The ranks are gone, or stuck in a collective that this rank has left.
            logger.warning("The other ranks cannot be told to close: %s", exc)
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

    def _on_all_ranks(self, command: str, batch: TrainingBatch | None = None, **arguments: Any) -> Any:
        """Call the method `command` of every rank's trainer; returns this rank's result."""
        with self._ranks_watched():
            if self._channel is not None:
                version = {} if batch is None else {"batch_version": batch.version}
                self._channel.send({"command": command, **version, **arguments}, {} if batch is None else batch.arrays(), _PATIENCE)
            return _call(self._local, command, batch, arguments)

    @contextmanager
    def _ranks_watched(self) -> Iterator[None]:
        """Raise UserError with the rank and its exit code if a collective fails because a rank is gone."""
        try:
            yield
        except RuntimeError as exc:
            gone = self._gone_rank(Deadline.after(_NOTICE_S))
            if gone is None:
                raise
            rank, child = gone
            raise UserError(
                f"Rank {rank} of the trainer (process {child.pid}) has ended with exit code {child.returncode}.",
                hint="The end of its output is in the learner's log; -9 mostly means that memory ran out. Start again: the run goes on.",
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
    """The trainer on rank 0, with `num_ranks` − 1 further processes of this machine (or those of a launcher). Raises UserError."""
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    place = _launched_place() if launched else RankPlace(rank=0, world_size=num_ranks, port=free_ports(1)[0])
    children = [] if launched else [_start_rank(config, place, rank) for rank in range(1, place.world_size)]
    try:
        return RankedTrainer(DeepSpeedTrainer(config, place), place, children)
    except BaseException:  # also an interrupt: no rank may outlive its learner
        for child in children:
            child.kill()
            child.wait()
        raise


def is_follower() -> bool:
    """Whether a launcher started this process as another rank than the learner."""
    return int(os.environ.get("RANK", "0")) > 0


def follow(config: TrainerConfig) -> None:
    """Run the learner's commands on this rank, until it closes."""
    trainer = DeepSpeedTrainer(config, _launched_place())
    channel = _Channel()
    while True:
        arguments, arrays = channel.receive()
        command = arguments.pop("command")
        if command == _CLOSE:
            trainer.close()
            return
        batch = TrainingBatch(version=arguments.pop("batch_version"), **arrays) if arrays else None
        try:
            _call(trainer, command, batch, arguments)
        except TrainingDiverged as exc:
            # Every rank raises it at once, and the learner decides.
            logger.warning("%s", exc)
        if command == "save":
            # This rank may be on another machine than the learner, which syncs only its own.
            sync_tree(Path(arguments["folder"]))
            channel.barrier()


def _call(trainer: DeepSpeedTrainer, command: str, batch: TrainingBatch | None, arguments: Mapping[str, Any]) -> Any:
    """The method `command` of the trainer, called with the command's arguments."""
    given = {name: Path(value) if name == "folder" else value for name, value in arguments.items()}
    return getattr(trainer, command)(**given, **({} if batch is None else {"batch": batch}))


class _Channel:
    """Commands from rank 0 to all others, over a gloo group of its own with a time-out of `_PATIENCE`."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def send(self, command: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], patience: timedelta) -> None:
        """Raises RuntimeError if a rank is gone or does not receive within `patience`."""
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


if __name__ == "__main__":
    set_up_logs_as_parent()
    follow(TypeAdapter(TrainerConfig).validate_json(os.environ[_CONFIG_VARIABLE]))
