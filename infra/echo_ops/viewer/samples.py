"""A group's samples side by side, and one trajectory token by token. Pure, but the history reads the log."""

from __future__ import annotations

import itertools

from echo_ops.harmless import harmless
from echo_ops.painting import Pieces, generated_places, passages_of
from echo_ops.viewer.drawings import Drawings
from echo_ops.viewer.steps import find_step, neighbours
from echo_ops.viewer.windows import Json, Window, number, shown
from echo_replay.history import History, HistoryRecord
from echo_replay.near import read_near
from echo_replay.origin import became
from echo_replay.selection import Groups, Offsets, Selection
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.records import Purpose, Trajectory

_PROMPT_CHARACTERS, _ANSWER_CHARACTERS = 4_000, 1_500
# Most records of a group; more are an error.
_MOST_RECORDS = 2_000
_LEARNER_METRICS = ("logprob_diff_mean", "logprob_diff_max", "fresh_logprob_diff_mean", "mismatch_kl", "ratio_mean", "clip_fraction")
# A tokenizer needs so many preceding tokens for a token's text.
_CONTEXT = 8


def group_page(history: History, group: str, window: Window, *, late: bool = False) -> Json:
    """All samples of a prompt, by attempt and index. `group`: `17`, `eval-3`. `late`: read rewards to the end of the log.

    Raises UserError if the log holds no record of the group.
    """
    group_id = f"{history.run_id}/{group}"
    seq = number_of(group)
    read = read_near(history, Selection(range=Groups(frozenset({group_id}))), late=late)
    found = sorted(itertools.islice(read, _MOST_RECORDS), key=_place_in_group)
    if not found:
        raise _nothing(history, group, seq)
    step = next((each.step for each in found if each.step is not None), None)
    before, after = neighbours(find_step(history, step), seq) if step is not None and seq is not None else (None, None)
    known = next((each.trajectory for each in found if each.trajectory is not None), None)
    return {
        "group": group,
        "group_id": group_id,
        "task": None if known is None else harmless(known.task),
        "purpose": None if known is None else known.purpose.value,
        "prompt": None if known is None else shown(known.prompt, _PROMPT_CHARACTERS),
        "step": step,
        "previous": before,
        "next": after,
        "window": window.plain(len(found)),
        "samples": [_sample(each) | {"answer": _answer(each)} for each in window.of(found)],
        "missing": list(history.missing),
    }


def trajectory_page(
    history: History, partition: int, offset: int, window: Window, pieces: Pieces | None, drawings: Drawings, *, late: bool = False
) -> Json:
    """One record and a window of its tokens. `pieces`: None without the tokenizer; the page then shows token ids only.

    Raises UserError if there is no trajectory of the run at this place.
    """
    record = next(read_near(history, Selection(range=Offsets({partition: (offset, offset)})), late=late), None)
    if record is None:
        raise UserError(f"At {partition}:{offset} lies no trajectory of {history.run_id}.", hint="Another run's record may lie there.")
    page = _sample(record) | {"time_ms": record.time_ms}
    trajectory = record.trajectory
    if trajectory is None:
        return page | {"window": window.plain(0), "tokens": None}
    tokens = trajectory.tokens
    return page | {
        "group": trajectory.group_id.rpartition("/")[2],
        "task": harmless(trajectory.task),
        "purpose": trajectory.purpose.value,
        "engine": harmless(trajectory.engine),
        "weights_sha256": trajectory.weights_sha256,
        "source": trajectory.source.value,
        "logprob_source": trajectory.logprob_source.value,
        "logprob_distribution": trajectory.logprob_distribution.value,
        "finish_reason": trajectory.finish_reason.value,
        "milliseconds": {
            "waited": trajectory.started_ms - trajectory.requested_ms,
            "generated": trajectory.finished_ms - trajectory.started_ms,
        },
        "turns": [{"start": turn.start, "end": turn.end, "is_generated": turn.is_generated} for turn in passages_of(trajectory)],
        "turn_rewards": [number(value) for value in trajectory.turn_rewards],
        "spans": [{"start": span.start, "end": span.end, "version": span.version} for span in trajectory.version_spans],
        "metadata": {harmless(name): harmless(value) for name, value in trajectory.metadata.items()},
        "prompt": shown(trajectory.prompt, _PROMPT_CHARACTERS),
        "answer": shown(trajectory.completion, _PROMPT_CHARACTERS),
        "window": window.plain(len(tokens)),
        "tokens": _tokens(trajectory, window, pieces),
        "frames": drawings.of(trajectory, pieces, history.log.runs[-1].config if history.log.runs else "{}"),
        "learner": _learner_said(history, record.step),
        "missing": list(history.missing),
    }


def _learner_said(history: History, step: int | None) -> Json:
    """The differences between the learner's and the sampler's log-probabilities, from the report of the step that trained it."""
    if step is None:
        return {}
    metrics = find_step(history, step).report.metrics
    return {name: number(metrics[name]) for name in _LEARNER_METRICS if name in metrics}


def _tokens(trajectory: Trajectory, window: Window, pieces: Pieces | None) -> Json:
    """Columns of the window: ids, texts (None without a tokenizer), log-probabilities (None for tokens that were not generated)."""
    ids = trajectory.tokens.tolist()
    first, end = min(window.offset, len(ids)), min(window.offset + window.limit, len(ids))
    logprobs: list[float | None] = [None] * (end - first)
    for place, value in zip(generated_places(trajectory), trajectory.logprob_values.tolist(), strict=True):
        if first <= place < end:
            logprobs[place - first] = number(value)
    begin = max(0, first - _CONTEXT)
    texts = None if pieces is None else [harmless(text, keep_lines=True) for text in pieces(ids[begin:end])[first - begin :]]
    return {"ids": ids[first:end], "texts": texts, "logprobs": logprobs}


def _sample(record: HistoryRecord) -> Json:
    drop, trajectory = record.drop, record.trajectory
    found: Json = {
        "partition": record.where.partition,
        "offset": record.where.offset,
        "fate": record.fate.value,
        "became": became(record),
        "step": record.step,
        "advantage": number(record.entry.advantage),
        "drop": None if drop is None else {"why": drop.why.value, "version": drop.learner_version, "detail": harmless(drop.detail)},
        "rewards": {harmless(name): number(value) for name, value in sorted(record.rewards.items())},
        "is_readable": trajectory is not None,
    }
    if trajectory is not None:
        values = trajectory.logprob_values
        found |= {
            "attempt": trajectory.attempt,
            "index": trajectory.index,
            "worker": trajectory.worker_id,
            "versions": [trajectory.min_version, trajectory.max_version],
            "num_tokens": len(trajectory.tokens),
            "num_generated": len(values),
            "mean_logprob": number(float(values.mean())),
        }
    return found


def _answer(record: HistoryRecord) -> Json | None:
    return None if record.trajectory is None else shown(record.trajectory.completion, _ANSWER_CHARACTERS)


def _place_in_group(record: HistoryRecord) -> tuple[bool, str, int, int]:
    trajectory = record.trajectory
    if trajectory is None:
        return True, "", 0, record.where.offset
    # The trained attempt comes first.
    return record.step is None, trajectory.attempt, trajectory.index, record.where.offset


def _nothing(history: History, group: str, seq: int | None) -> UserError:
    drop = None if seq is None else history.fates.drop_of_group(seq)
    if drop is not None:
        return UserError(
            f"{history.run_id}/{group} has no trajectory: its seq was dropped at version {drop.learner_version}, {drop.why.value}.",
            hint=harmless(drop.detail),
        )
    kinds = ", ".join(purpose.value for purpose in Purpose if purpose is not Purpose.TRAIN)
    return UserError(f"There is no group {group} of {history.run_id} in the log.", hint=f"Groups of {kinds} are named eval-3 or probe-3.")
