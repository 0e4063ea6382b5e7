"""Converts a trainer's state of another number of ranks, or another ZeRO stage, so that any number of ranks can read it.

    trainer/trainer/*_optim_states.pt (one a rank) ─ rank 0 ─▶ <scratch>/trainer/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt ─▶ all ranks

The form is DeepSpeed's universal checkpoint (https://www.deepspeed.ai/tutorials/universal-checkpointing/). Without ZeRO every rank holds
the same and nothing needs converting. All ranks call `universal_form`; rank 0 converts while the others wait. Imports DeepSpeed when used.
"""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_learner.training.deepspeed_setup import RankPlace
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_LAYOUT = "layout.json"
# Stages with the same universal form have the same number. Without ZeRO each rank holds everything, so all read the first one's file.
_KIND = {0: 0, 1: 1, 2: 1, 3: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The number of ranks and the ZeRO stage of a trainer's state."""

    ranks: int
    stage: int

    def write(self, folder: Path) -> None:
        """Write it beside the state. Called by one rank."""
        (folder / _LAYOUT).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> ShardLayout:
        """The layout of the state in `folder`. Raises UserError if it is missing or not whole."""
        try:
            return ShardLayout(**json.loads((folder / _LAYOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as exc:
            raise UserError(
                f"How the trainer state in {folder} is spread over ranks cannot be read: {exc}.", hint="Bring the folder back as it was."
            ) from exc

    def needs_converting(self, ours: ShardLayout) -> bool:
        """Whether ranks of the layout `ours` can read it only after a conversion. Raises UserError if not even then."""
        if _KIND[self.stage] != _KIND[ours.stage]:
            raise UserError(
                f"The trainer state was written under ZeRO stage {self.stage}, and stage {ours.stage} cannot read its optimizer.",
                hint="Put the stage in [learner] deepspeed back, or begin a run with a fresh optimizer from the same weights: "
                "`echoswarm fork NAME --version N --weights-only`.",
            )
        return self.stage > 0 and self != ours


@contextmanager
def universal_form(folder: Path, tag: str, place: RankPlace, device: torch.device) -> Iterator[Path]:
    """A temporary folder with `folder`/`tag` in universal form under the same tag. A collective: all ranks see it.

    It lies beside the checkpoint, which all ranks can reach. Raises UserError if DeepSpeed cannot convert it or the disk refuses.
    """
    scratch = folder.parent.parent / f".{folder.parent.name}.universal"
    problem = _convert(folder / tag, scratch / tag) if place.rank == 0 else None
    try:
        if not _all_well(problem is None, place, device):
            raise UserError(
                f"The trainer state in {folder} could not be made readable for {place.world_size} ranks: {problem or 'rank 0 says why'}.",
                hint="Set [learner] ranks and the ZeRO stage to those that wrote it, or free space beside the checkpoint.",
            )
        yield scratch
    finally:
        # Wait until no rank reads any more.
        _all_well(True, place, device)
        if place.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)


def _convert(source: Path, target: Path) -> str | None:
    """The error as text, or None."""
    from deepspeed.checkpoint.ds_to_universal import main

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    arguments: Any = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with (target.parent / "log.txt").open("w", encoding="utf-8") as log, redirect_stdout(log):
            main(arguments)
    except Exception as exc:  # the converter raises any error, also assertions
        logger.exception("The trainer state could not be converted")
        return str(exc) or repr(exc)
    return None


def _all_well(is_well: bool, place: RankPlace, device: torch.device) -> bool:
    """Whether `is_well` holds on every rank."""
    if place.world_size == 1:
        return is_well
    votes = torch.tensor([int(is_well)], device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())
