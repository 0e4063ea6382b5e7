"""`echoswarm search`: which trajectories hold a text or a row of tokens."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer
from rich.text import Text

from echo_bus.clock import SystemClock
from echo_ops.cli.context import read_settings
from echo_ops.cli.options import AsJson, Config, Exported, Follow, RunName, in_range
from echo_ops.cli.output import err, out, remark
from echo_ops.cli.past import going_on, history_of, past_of
from echo_ops.harmless import harmless
from echo_ops.ranges import RangeOptions, selection_of
from echo_replay.history import HistoryRecord
from echo_replay.origin import became
from echo_replay.searching import Hit, TextMatcher, TokenMatcher, parse_tokens
from echo_replay.sinks import spoken
from echo_schemas.errors import UserError
from echo_schemas.records import Trajectory

_FIELDS = {"prompt": ("prompt",), "answer": ("completion",), "both": ("prompt", "completion")}
# Characters and tokens that are shown before and after a hit.
_AROUND, _TOKENS_AROUND = 40, 4
# Without colours these stand around a hit.
_MARKS = ("«", "»")


@in_range
def search(
    pattern: Annotated[str | None, typer.Argument(help="A regular expression, in prompts and answers.")] = None,
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    tokens: Annotated[str, typer.Option(metavar="17,4,9", help="Token ids that follow one another, instead of a text.")] = "",
    within: Annotated[Literal["prompt", "answer", "both"], typer.Option("--in", help="Where to look for a text.")] = "both",
    ignore_case: Annotated[bool, typer.Option("--ignore-case", "-i", help="Ignore the case of letters.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Stop after so many; 0: find all.")] = 100,
    *,
    options: RangeOptions,
    follow: Follow = False,
    as_json: AsJson = False,
) -> None:
    """Print each hit at once, and at the end their number."""
    if (pattern is None) == (not tokens):
        raise UserError("Search for a text or for tokens.", hint="Write echoswarm search 'regex', or echoswarm search --tokens 17,4,9.")
    matcher = (
        TextMatcher(pattern, ignore_case=ignore_case, within=_FIELDS[within]) if pattern is not None else TokenMatcher(parse_tokens(tokens))
    )
    if follow and source is not None:
        raise UserError("An export does not go on, so nothing of it can be followed.", hint="Leave --follow or --from out.")
    run_id, reach = past_of(read_settings(config), run, source)
    selection = selection_of(options, run_id, SystemClock().time_ms())
    num_looked_at = num_found = 0
    with history_of(reach(), run_id) as history:
        for record in going_on(history, selection) if follow else history.read(selection):
            if record.trajectory is None:
                continue
            num_looked_at += 1
            if (hit := matcher.find(record.trajectory)) is None:
                continue
            num_found += 1
            _show(record, record.trajectory, hit, as_json=as_json)
            if num_found == limit:
                break
        remark("missing", history.missing)
    more = f"; stopped at --limit {limit}" if limit and num_found == limit else ""
    empty = "" if num_looked_at else ": none is in this range and passes these filters"
    err.print(f"{num_found:,} found in {num_looked_at:,} trajectories of {run_id}{more}{empty}", markup=False)


def _show(record: HistoryRecord, trajectory: Trajectory, hit: Hit, *, as_json: bool) -> None:
    if as_json:
        content = {
            "at": [record.where.partition, record.where.offset],
            "found": {"in": hit.where, "start": hit.start, "end": hit.end},
            **spoken(record),
        }
        sys.stdout.write(json.dumps(content) + "\n")
        return
    rewards = " ".join(f"{harmless(name)} {value:.3g}" for name, value in sorted(record.rewards.items()))
    place = f"{record.where.partition}:{record.where.offset}"
    title = Text.assemble(
        (f"{place:<9}", "bold cyan"), f" {harmless(trajectory.group_id)}/{trajectory.index}  ", (became(record), "dim"), f"  {rewards}  "
    )
    out.print(title + _snippet(trajectory, hit))


def _snippet(trajectory: Trajectory, hit: Hit) -> Text:
    around = _TOKENS_AROUND if hit.where == "tokens" else _AROUND
    bounds = ((max(0, hit.start - around), hit.start), (hit.start, hit.end), (hit.end, hit.end + around))
    if hit.where == "tokens":
        tokens = trajectory.tokens.tolist()
        before, inside, after = (" ".join(map(str, tokens[start:end])) for start, end in bounds)
        return Text.assemble((f"tokens at {hit.start}: ", "dim"), f"{before} ", (_marked(inside), "bold reverse"), f" {after}")
    before, inside, after = (harmless(hit.text[start:end]) for start, end in bounds)
    name = "prompt" if hit.where == "prompt" else "answer"
    return Text.assemble((f"{name}: ", "dim"), before, (_marked(inside), "bold reverse"), after)


def _marked(text: str) -> str:
    return text if out.is_terminal else text.join(_MARKS)
