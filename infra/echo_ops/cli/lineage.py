"""`echoswarm lineage`: what made a version's weights, and what became of its samples."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.text import Text

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import AsJson, Config, Exported, Late, RunName
from echo_ops.cli.output import out, remark, shown_time
from echo_ops.cli.past import history_of, past_of, remark_later
from echo_ops.harmless import harmless
from echo_replay.history import History
from echo_replay.origin import VersionOrigin, origin_of
from echo_schemas.errors import UserError

_VERSION = re.compile(r"v?(\d{1,18})")
# Groups that are named one by one; the rest are counted.
_NAMED = 12


def lineage(
    version: Annotated[str, typer.Argument(help="A version, such as v120.")],
    config: Config = None,
    run: RunName = "",
    source: Exported = None,
    late: Late = False,
    as_json: AsJson = False,
) -> None:
    """Print the origin of a version. Raises UserError."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise UserError(f"{version!r} is no version.", hint="Write v120 or 120.")
    name, reach = past_of(read_settings(config), run, source)
    with history_of(reach(), name) as history:
        origin = origin_of(history, int(match[1]), late=late)
        if as_json:
            sys.stdout.write(json.dumps(origin.to_plain()) + "\n")
            return
        _show_made(history, origin)
        _show_groups(origin, _NAMED)
        if origin.manifest is None:
            show_line("samples", f"none: v{origin.version} was not published")
        else:
            show_line("samples", f"of v{origin.version}: {_counted(origin.became) or 'none'}")
        _notes(history, origin)


def show_step(history: History, origin: VersionOrigin, *, as_json: bool) -> None:
    """What `echoswarm show v120` prints: the step with every group of it."""
    if as_json:
        sys.stdout.write(json.dumps(origin.to_plain()) + "\n")
        return
    _show_made(history, origin)
    _show_groups(origin, len(origin.groups))
    _notes(history, origin)


def _show_made(history: History, origin: VersionOrigin) -> None:
    out.print(Text.assemble((f"{history.run_id} v{origin.version}", "bold"), f"  {_published(origin)}"))
    report = origin.report
    if report is None:
        parent = origin.manifest and origin.manifest.parent_run
        begun = f"forked from {parent} v{origin.manifest.parent}" if origin.manifest and parent else "what the run began with"
        show_line("made of", f"{begun}; no step made it")
        return
    show_line(
        "made", f"{shown_time(report.time_ms)} by session {report.session}, in {report.training_s:.1f} s on {report.world_size} rank(s)"
    )
    show_line("made of", f"checkpoint {report.parent or 'of the base model'}, now {report.checkpoint}")
    num_samples = sum(origin.workers.values())
    show_line("batch", f"{len(origin.groups)} groups, {num_samples} samples")
    show_line("workers", _counted(origin.workers))
    show_line("sampler", _counted({f"v{version}": count for version, count in sorted(origin.sampled_by.items())}))
    for name, moments in sorted(origin.rewards.items()):
        show_line("reward", f"{name}: mean {moments.mean:.4g}, std {moments.std:.4g}, {moments.least:.4g} to {moments.most:.4g}")
    if report.policy is not None:
        show_line("policy", f"budget {report.policy.budget}, older ones {report.policy.over_budget}")


def _show_groups(origin: VersionOrigin, most: int) -> None:
    shown = list(origin.groups.values())[:most]
    width = max((len(group.group_id) for group in shown), default=0)
    for group in shown:
        rewards = "  ".join(f"{harmless(name)} {moments.mean:.3g}" for name, moments in sorted(group.rewards.items()))
        advantages = f"{min(group.advantages):+.2f} to {max(group.advantages):+.2f}" if group.advantages else "-"
        versions = ", ".join(f"v{version}" for version in sorted(group.versions))
        text = f"{group.group_id:<{width}} {group.num_samples:>3} samples  {rewards:<20}  advantages {advantages:<16} by {versions}"
        show_line("group", text)
    if len(origin.groups) > most:
        show_line("", f"… and {len(origin.groups) - most} groups more: `echoswarm show v{origin.version}`")


def _published(origin: VersionOrigin) -> str:
    manifest = origin.manifest
    if manifest is None:
        return "not published"
    return (
        f"{manifest.kind.value}, {manifest.num_bytes:,} bytes, sha256 {manifest.sha256[:12]}, published {shown_time(manifest.created_ms)}"
    )


def _notes(history: History, origin: VersionOrigin) -> None:
    remark_later(origin.num_later_rewards)
    remark("missing", origin.missing)
    remark("note", history.notes)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def show_line(title: str, text: str) -> None:
    """Print a title and its text, made harmless."""
    out.print(Text.assemble((f"  {title:<9}", "dim"), harmless(text)))
