"""`echoswarm show`: a group, one record or a step on the screen."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from echo_ops.cli.context import read_settings
from echo_ops.cli.lineage import show_line, show_step
from echo_ops.cli.options import AsJson, Config, Exported, Late, RunName
from echo_ops.cli.output import out, remark
from echo_ops.cli.past import history_of, past_of, remark_later
from echo_ops.harmless import harmless
from echo_ops.painting import LEGENDS, Colour, Pieces, generated_places, paint, passages_of, tokenizer_of
from echo_ops.ranges import parse_group
from echo_replay.history import History, HistoryRecord
from echo_replay.near import read_near
from echo_replay.origin import became, origin_of
from echo_replay.selection import Fate, Groups, Offsets, Selection
from echo_replay.sinks import spoken
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.records import LogprobSource, Trajectory

_VERSION = re.compile(r"v(\d{1,18})")
_COORDINATES = re.compile(r"(?:trajectories)?\[?(\d{1,9})\]?\s?[:@]\s?(\d{1,18})")
_REST = r"(?P<group>(?:eval-|probe-)?\d{1,18})(?:/(?P<attempt>[^/]+)(?:/(?P<index>\d{1,9}))?)?"
_MEMBER = re.compile(_REST)
_MEMBER_OF_RUN = re.compile(rf"(?P<run>[^/]+)/{_REST}")
_FATE_STYLES = {Fate.TRAINED: "green", Fate.DROPPED: "yellow", Fate.DEAD: "red"}
# How many of the least likely tokens are named.
_UNLIKELY = 3


@dataclass(frozen=True, slots=True)
class Target:
    """What to show: a version, coordinates, or a group of `run`, perhaps only one attempt or member of the group."""

    version: int | None = None
    coordinates: tuple[int, int] | None = None
    group: str = ""
    run: str = ""
    attempt: str = ""
    index: int | None = None


def parse_target(text: str, run_id: str) -> Target:
    """The target that `text` names. Raises UserError."""
    if (match := _VERSION.fullmatch(text)) is not None:
        return Target(version=int(match[1]))
    if (match := _COORDINATES.fullmatch(text)) is not None:
        return Target(coordinates=(int(match[1]), int(match[2])))
    # A run may be called 17, too: for such a run --run is needed.
    if (match := _MEMBER.fullmatch(text) or _MEMBER_OF_RUN.fullmatch(text)) is not None:
        run = match.groupdict().get("run") or run_id
        group = parse_group(match["group"], run)
        return Target(group=group, run=run, attempt=match["attempt"] or "", index=number_of(match["index"]))
    raise UserError(
        f"{text!r} is no group, no coordinates and no version.",
        hint=f"Write {run_id}/17 (a group; a run's name has no slash), 3:1234 (partition and offset of trajectories) or v120 (a version).",
    )


def show(
    target: Annotated[str, typer.Argument(help="A group (demo/17 or 17), a record (3:1234, partition and offset) or a step (v120).")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    colour: Annotated[Colour, typer.Option("--color", help="What the colour of a token says.")] = Colour.LOGPROB,
    late: Late = False,
    as_json: AsJson = False,
) -> None:
    """Show what `target` names."""
    settings = read_settings(config)
    name, reach = past_of(settings, run, source)
    wanted = parse_target(target.strip(), name)
    run_id = run or wanted.run or name
    if wanted.run and wanted.run != run_id:
        raise UserError(f"{target!r} is not of the run {run_id!r}.", hint=f"Leave --run out, or write --run {wanted.run}.")
    with history_of(reach(), run_id) as history:
        if wanted.version is not None:
            show_step(history, origin_of(history, wanted.version, with_samples=False, late=late), as_json=as_json)
            return
        found = list(read_near(history, _selection(wanted), late=late))
        remark_later(history.num_later_rewards)
        remark("missing", history.missing)
        found = [each for each in found if _is_wanted(each, wanted)]
        if not found:
            raise _nothing(history, target, wanted)
        if as_json:
            for each in found:
                sys.stdout.write(json.dumps({"at": [each.where.partition, each.where.offset], **spoken(each)}) + "\n")
            return
        base = history.log.runs[-1].model if history.log.runs else settings.policy.base
        _show_all(history, found, tokenizer_of(base), colour)


def _selection(wanted: Target) -> Selection:
    if wanted.coordinates is not None:
        partition, offset = wanted.coordinates
        return Selection(range=Offsets({partition: (offset, offset)}))
    return Selection(range=Groups(frozenset({wanted.group})))


def _is_wanted(record: HistoryRecord, wanted: Target) -> bool:
    if record.trajectory is None:
        return not wanted.attempt
    # `demo/17/3`, as `echoswarm search` prints it, is sample 3 of every attempt.
    is_sample = wanted.index is None and number_of(wanted.attempt) == record.trajectory.index
    is_attempt = not wanted.attempt or record.trajectory.attempt == wanted.attempt
    return is_sample or (is_attempt and wanted.index in (None, record.trajectory.index))


def _nothing(history: History, target: str, wanted: Target) -> UserError:
    if wanted.coordinates is not None:
        return UserError(
            f"At {target} lies no trajectory of {history.run_id}.",
            hint="Another run's record may lie there, or a transaction's mark: `echoswarm tail trajectories --all-runs` shows all.",
        )
    seq = number_of(wanted.group.rpartition("/")[2])
    drop = None if seq is None else history.fates.drop_of_group(seq)
    if drop is not None:
        return UserError(
            f"{wanted.group} has no trajectory: its seq was dropped at version {drop.learner_version}, {drop.why.value}.",
            hint=harmless(drop.detail) or "`echoswarm tail drops` shows drops.",
        )
    if wanted.attempt:
        return UserError(f"The log holds no trajectory {target}.", hint=f"`echoswarm show {wanted.group}` shows all of the group.")
    newest = max((int(step.seqs.max()) for step in history.log.steps if len(step.seqs)), default=None)
    hint = "Nothing was trained yet." if newest is None else f"The highest seq that was trained is {newest}."
    return UserError(
        f"There is no group {wanted.group} in the log.", hint=f"{hint} Groups of an evaluation are named {history.run_id}/eval-3."
    )


def _show_all(history: History, found: Sequence[HistoryRecord], pieces: Pieces | None, colour: Colour) -> None:
    groups = {each.trajectory.group_id for each in found if each.trajectory is not None}
    attempts = {each.trajectory.attempt for each in found if each.trajectory is not None}
    what = ", ".join(sorted(groups)) or "a record that cannot be read"
    tries = "" if len(attempts) < 2 else f" of {len(attempts)} attempts"
    out.print(Text.assemble((harmless(what), "bold"), f": {len(found)} {'sample' if len(found) == 1 else 'samples'}{tries}"))
    if pieces is None:
        out.print(Text("The tokenizer is not on this machine: token ids stand for text.", "dim"))
    if colour is not Colour.NONE and out.is_terminal:
        out.print(LEGENDS[colour])
    for each in found:
        _show_one(each, pieces, colour)
    remark("note", history.notes)


def _show_one(record: HistoryRecord, pieces: Pieces | None, colour: Colour) -> None:
    trajectory = record.trajectory
    where = f"{record.where.partition}:{record.where.offset}"
    time = datetime.fromtimestamp(record.time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    name = "unreadable" if trajectory is None else f"attempt {trajectory.attempt}, sample {trajectory.index}"
    out.print()
    out.print(Text.assemble((where, "bold cyan"), f"  {harmless(name)}  ", (_fate_line(record), _FATE_STYLES.get(record.fate, "blue"))))
    if trajectory is None:
        out.print(Text(f"  written {time}; the bytes are no record: `echoswarm tail trajectories.dlq` shows the copy and why."))
        return
    rewards = "  ".join(f"{harmless(reward)} {value:.4g}" for reward, value in sorted(record.rewards.items())) or "none"
    turn_rewards = f"   by turn {', '.join(f'{value:.4g}' for value in trajectory.turn_rewards)}" if trajectory.turn_rewards else ""
    show_line("rewards", f"{rewards}{turn_rewards}")
    show_line("versions", ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in trajectory.version_spans))
    show_line("sampled", f"{trajectory.worker_id}, {trajectory.engine}, ended by {trajectory.finish_reason.value}, written {time}")
    show_line("drawn", _drawn_line(trajectory))
    show_line("tokens", _tokens_line(trajectory, pieces))
    said = ""
    for passage in passages_of(trajectory):
        title = "policy" if passage.is_generated else "given"
        painted = paint(record, trajectory, passage, pieces, colour)
        said += painted.plain
        out.print(Text.assemble((f"  {title:<9}", "dim"), (f"[{passage.start}, {passage.end})  ", "dim"), painted))
    # The texts in the record, if there is no tokenizer, or they differ from the text of the tokens.
    for title, text in (("prompt", trajectory.prompt), ("answer", trajectory.completion)):
        if pieces is None or harmless(text, keep_lines=True) not in said:
            show_line(title, text)


def _fate_line(record: HistoryRecord) -> str:
    if record.fate is Fate.TRAINED:
        return f"{became(record)}, advantage {record.entry.advantage:+.4f}"
    if record.drop is None:
        return record.fate.value
    detail = f" ({harmless(record.drop.detail)})" if record.drop.detail else ""
    whole = ", with its seq" if record.drop.of_group else ""
    return f"{became(record)}{whole}, learner at v{record.drop.learner_version}{detail}"


def _drawn_line(trajectory: Trajectory) -> str:
    """From what tokens were drawn, and what their log-probabilities are of."""
    sampling = trajectory.sampling
    cuts = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    said = ", ".join(
        [f"temperature {sampling.temperature:g}", *(f"{name} {value:g}" for name, (value, off) in cuts.items() if value != off)]
    )
    if trajectory.logprob_source is LogprobSource.RECOMPUTED:
        return f"{said}; the learner computes the log-probabilities"
    if not sampling.cuts:
        return said
    return f"{said}; log-probabilities of {'what was left to draw from' if trajectory.is_cut else 'the whole distribution'}"


def _tokens_line(trajectory: Trajectory, pieces: Pieces | None) -> str:
    values, places = trajectory.logprob_values, generated_places(trajectory)
    order = sorted(range(len(places)), key=lambda at: float(values[at]))[:_UNLIKELY]
    tokens = trajectory.tokens
    named = []
    for at in order:
        token = int(tokens[places[at]])
        text = repr(pieces([token])[0]) if pieces is not None else str(token)
        named.append(f"{text} at {places[at]} ({float(values[at]):.2f})")
    return (
        f"{len(tokens)}, of them {len(places)} generated; mean log-probability {float(values.mean()):.3f}; least likely {', '.join(named)}"
    )
