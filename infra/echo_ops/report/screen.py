"""The live screen: draws a `RunView` about once a second, on the thread that calls `draw`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from echo_core.bottleneck import describe
from echo_ops.report.evaluations import numbers
from echo_ops.report.pool import WorkerLine
from echo_ops.report.run_view import MEAN_OVER, Milestone, RunView
from echo_ops.report.summary import or_dash
from echo_ops.rewards.watch import ScorerLine, ScorerState
from echo_schemas.records import WorkerState

DRAW_EVERY_S = 0.75
_BAR = "█"
_BAR_WIDTH = 24
_NUM_NOTES = 3
_NUM_DECISIONS = 3
_AXIS_WIDTH = 6
_STALENESS_STYLES = ("green", "yellow", "dark_orange", "red")
_BLANK = 0x2800
# Bit of the dot at (row, column) within a character.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_DOT_ROWS, _DOT_COLUMNS = 4, 2
Point = tuple[float, float]


class Screen:
    """Uses the terminal's whole screen inside its block."""

    def __init__(self, console: Console, elapsed_s: Callable[[], float], where: str) -> None:
        self._console = console
        self._elapsed_s = elapsed_s
        self._where = where
        self._notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._drawn_s = -DRAW_EVERY_S

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Add a line at the bottom with the time since the start: what it says may be over by now. The oldest one goes."""
        self._notes.append(f"{_clock(self._elapsed_s())} {line}")

    @property
    def is_due(self) -> bool:
        return self._elapsed_s() - self._drawn_s >= DRAW_EVERY_S

    def draw(self, view: RunView) -> None:
        self._drawn_s = self._elapsed_s()
        size = self._console.size
        self._live.update(render(view, self._drawn_s, size.width, size.height, self._where, list(self._notes)), refresh=True)


def render(view: RunView, elapsed_s: float, width: int, height: int, where: str, notes: list[str]) -> RenderableType:
    """The whole screen of `width` × `height` characters."""
    notes = [*(f"{_clock(each.time_s)} coordinator: {each.in_words()}" for each in view.decisions[-_NUM_DECISIONS:]), *notes]
    layout = Layout()
    bottom = 2 + max(5, min(len(Milestone), height // 3))
    layout.split_column(
        Layout(_title(view, elapsed_s), size=3),
        Layout(name="middle", ratio=1),
        Layout(name="bottom", size=bottom),
        Layout(_foot(view, where, notes), size=2 + len(notes)),
    )
    side = max(38, width // 3)
    layout["middle"].split_row(
        Layout(_reward(view, width - side - 4, height - bottom - 9 - len(notes)), ratio=1), Layout(_numbers(view), size=side)
    )
    layout["bottom"].split_row(
        Layout(_workers(view, elapsed_s, width - side, bottom), ratio=1), Layout(_queues(view) if view.steps else _startup(view), size=side)
    )
    return layout


def _title(view: RunView, elapsed_s: float) -> RenderableType:
    title = Text(no_wrap=True)
    title.append(f" {view.run_id} ", "bold")
    title.append(f"  {_clock(elapsed_s)}", "cyan")
    title.append(f"   step {view.num_steps}{f' of {view.steps_wanted}' if view.steps_wanted else ''}", "bold")
    pace, eta = view.s_per_step(MEAN_OVER), view.eta_s()
    if pace is not None:
        title.append(f"   {pace:.2f} s a step")
    if eta is not None:
        title.append(f"   {_clock(eta)} to go", "dim")
    return Panel(title, border_style="cyan")


def _reward(view: RunView, width: int, height: int) -> RenderableType:
    title = "exact match" if view.is_exact else "reward"
    if not view.steps:
        waiting = Text("\n  The first batch is on its way: libraries load, Kafka starts, weights travel.", "dim")
        return Panel(waiting, title=title, border_style="green", title_align="left")
    rewards, means = [step.reward for step in view.steps], view.mean_rewards()
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    last = max(view.steps_wanted, view.num_steps, 2)
    canvas = Canvas(width - _AXIS_WIDTH, max(3, height))

    def place(number: int, value: float) -> tuple[float, float]:
        return (number - 1) / (last - 1), (value - low) / (high - low)

    for step in view.steps:
        canvas.dot(*place(step.number, step.reward), "bright_black")
    canvas.line([place(step.number, mean) for step, mean in zip(view.steps, means, strict=True)], "bold green")
    rows = canvas.rows()
    labels = {0: high, len(rows) // 2: (low + high) / 2, len(rows) - 1: low}
    lines = [Text(f"{labels[index]:5.2f} " if index in labels else " " * _AXIS_WIDTH, "dim") + row for index, row in enumerate(rows)]
    title += f"  {rewards[-1]:.3f}, mean of ten steps [bold green]{means[-1]:.3f}[/]"
    return Panel(Group(*lines), title=title, border_style="green", title_align="left")


def _numbers(view: RunView) -> RenderableType:
    parts: list[RenderableType] = [Text("staleness of the last ten steps", "bold")]
    histogram = view.staleness(MEAN_OVER)
    total = sum(histogram) or 1
    for age in range(max(view.budget + 1, len(histogram))):
        share = (histogram[age] if age < len(histogram) else 0) / total
        bar = Text(f" {age} ")
        bar.append(_BAR * round(share * _BAR_WIDTH), _STALENESS_STYLES[min(age, len(_STALENESS_STYLES) - 1)])
        bar.append(f" {share:.0%}", "dim")
        parts.append(bar)
    parts.append(Text())
    table = Table.grid(padding=(0, 2))
    pace, bubble = view.samples_per_s(), view.bubble_ratio(MEAN_OVER)
    last = view.steps[-1].metrics if view.steps else {}
    table.add_row("trained", "–" if pace is None else f"{pace:,.0f} samples/s")
    table.add_row("learner idle", "–" if bubble is None else f"{bubble:.0%}")
    table.add_row("entropy", or_dash(last.get("entropy"), ".2f"))
    table.add_row("mismatch KL", or_dash(last.get("mismatch_kl"), ".1e"))
    table.add_row("log-prob. difference", or_dash(last.get("probe_logprob_diff_max"), ".1e"))
    table.add_row("weights installed in", or_dash(last.get("broadcast_s"), ".3f", " s"))
    if view.bill.total:
        table.add_row("cost so far", f"{view.bill.total:.4g}, {or_dash(view.bill.per_step, '.3g')} a step")
        table.add_row("of it idle, standby", f"{view.bill.workers.idle:.3g}, {view.bill.workers.standby:.3g}")
    parts.append(table)
    parts += [_scorer(line) for line in view.scorers if line.state is not ScorerState.DETACHED]
    parts += [Text(f"{each.name} v{each.version}: {numbers(each)}", "cyan", no_wrap=True) for each in view.evaluations.newest()]
    return Panel(Group(*parts), title="learner", border_style="magenta", title_align="left")


def _scorer(line: ScorerLine) -> Text:
    """One reward: its state, how far it is behind, and the policy for missing rewards if its process is gone."""
    text = Text()
    text.append(f"{line.name.rpartition(':')[2]} ", "bold")
    text.append(f"{line.weight:g} " if line.weight else "shadow ", "green" if line.weight else "dim")
    text.append("–" if line.mean is None else f"{line.mean:.3f}")
    gone = line.state is ScorerState.GONE
    text.append(f"  {line.state.value}", "bold red" if gone else "dim")
    if gone:
        text.append(f": {line.policy}", "red" if line.weight else "dim")
    elif line.behind.num:
        text.append(f", {line.behind.seconds:.0f} s behind", "yellow" if line.state is ScorerState.CATCHING_UP else "dim")
    if line.num_failed:
        text.append(f", {line.num_failed:,} failed", "red")
    return text


def _workers(view: RunView, elapsed_s: float, width: int, height: int) -> RenderableType:
    """A line per worker over the last seconds, with as many columns as fit; the last line sums up the workers without one."""
    lines = view.pool.lines(recent=True)
    columns = _columns(width, lines, elapsed_s)
    table = Table(expand=True, box=None, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    room = height - _FRAME_ROWS
    shown = lines if len(lines) <= room else lines[: room - 1]
    for line in shown:
        table.add_row(*(_COLUMNS[name](line, elapsed_s) for name in columns))
    if len(shown) < len(lines):
        rest = lines[len(shown) :]
        table.add_row(f"and {len(rest)} more, {sum(line.samples_per_s or 0.0 for line in rest):,.0f} samples/s")
    published = "" if view.progress is None else f", newest weights v{view.progress.published}"
    return Panel(table, title=f"workers{published}", border_style="blue", title_align="left")


def _columns(width: int, lines: Sequence[WorkerLine], now_s: float) -> list[str]:
    """The names of the columns that fit, in their order; the most important ones are chosen first."""
    has_kinds, has_prices = any(line.kind for line in lines), any(line.price_per_hour for line in lines)
    unasked = {*(() if has_kinds else ("kind",)), *(() if has_prices else ("price/h", "per 1,000"))}
    left, chosen = width - _FRAME_COLUMNS, set()
    for name in _BY_IMPORTANCE:
        needed = _COLUMN_SPACE + max(len(name), *(len(_COLUMNS[name](line, now_s)) for line in lines), 0)
        if name not in unasked and needed <= left:
            left -= needed
            chosen.add(name)
    return [name for name in _COLUMNS if name in chosen]


# Rows for the panel's border and the columns' heads; characters for the border with its space, and for the space around a column.
_FRAME_ROWS, _FRAME_COLUMNS, _COLUMN_SPACE = 3, 4, 2


# Without a heartbeat for so long, a worker's last state is out of date.
_SILENT_S = 10.0


_LEFT = {"worker", "kind", "engine", "state"}


def _state(line: WorkerLine, now_s: float) -> str:
    is_silent = line.state is not WorkerState.GONE and now_s - line.heard_s > _SILENT_S
    return "silent" if is_silent else line.state.value


# Name: its text for a worker at a time.
_COLUMNS: dict[str, Callable[[WorkerLine, float], str]] = {
    "worker": lambda line, now_s: line.worker_id,
    "kind": lambda line, now_s: line.kind or "–",
    "engine": lambda line, now_s: line.engine.rpartition(":")[2],
    "state": _state,
    "version": lambda line, now_s: "–" if line.version is None else f"v{line.version}",
    "samples/s": lambda line, now_s: or_dash(line.samples_per_s, ",.1f"),
    "share": lambda line, now_s: or_dash(line.share, ".0%"),
    "idle": lambda line, now_s: or_dash(line.idle_share, ".0%"),
    "stale": lambda line, now_s: or_dash(line.staleness_mean, ".1f"),
    "price/h": lambda line, now_s: f"{line.price_per_hour:g}",
    "per 1,000": lambda line, now_s: or_dash(line.cost_per_1000, ".3g"),
    "tokens/s": lambda line, now_s: f"{line.tokens_per_s:,.0f}",
    "in flight": lambda line, now_s: str(line.in_flight),
    "heard": lambda line, now_s: f"{max(0.0, now_s - line.heard_s):.0f} s ago",
}


_BY_IMPORTANCE = (
    *("worker", "state", "version", "samples/s", "share", "stale", "idle", "kind"),
    *("per 1,000", "engine", "price/h", "heard", "in flight", "tokens/s"),
)


def _queues(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, lag in view.lags.items():
        table.add_row(name, f"{lag:,}")
    if view.progress is not None:
        table.add_row("groups ready", f"{view.progress.groups_ready:,}")
    table.add_row("published", f"{view.trajectories_published:,}")
    dropped = ", ".join(f"{count} {reason}" for reason, count in view.drops.most_common(3))
    table.add_row("dropped", Text(dropped or "none", "yellow" if dropped else "green"))
    return Panel(table, title="queues", border_style="blue", title_align="left")


def _startup(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for milestone in Milestone:
        time_s = view.milestones.get(milestone)
        mark = Text("·", "dim") if time_s is None else Text("✓", "green")
        table.add_row(mark, Text(view.words_of(milestone), "dim" if time_s is None else ""), "" if time_s is None else f"{time_s:.1f} s")
    return Panel(table, title="start", border_style="blue", title_align="left")


def _foot(view: RunView, where: str, notes: list[str]) -> RenderableType:
    sentence = Text(f" {describe(view.bottleneck(recent=True))}" if view.steps else " Starting.", "bold yellow", no_wrap=True)
    if disbelief := view.disbelief():
        sentence = Text(f" {disbelief}", "bold red", no_wrap=True)
    ending = Text(f" Logs: {where}. Ctrl-C drains, twice ends at once.", "dim", no_wrap=True)
    return Group(sentence, *(Text(f" {note}", no_wrap=True) for note in notes), ending)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"


class Canvas:
    """A grid of characters for curves of braille dots: two columns and four rows of dots in each character. Pure.

    Coordinates are fractions: x from the left, y from the bottom, both in [0, 1].
    """

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = max(1, width), max(1, height)
        self._bits = [[0] * self._width for _ in range(self._height)]
        self._styles = [[""] * self._width for _ in range(self._height)]

    def dot(self, x: float, y: float, style: str) -> None:
        """One dot; the newest style wins its character."""
        column = min(self._width * _DOT_COLUMNS - 1, max(0, round(x * (self._width * _DOT_COLUMNS - 1))))
        row = min(self._height * _DOT_ROWS - 1, max(0, round((1 - y) * (self._height * _DOT_ROWS - 1))))
        self._bits[row // _DOT_ROWS][column // _DOT_COLUMNS] |= _DOTS[row % _DOT_ROWS][column % _DOT_COLUMNS]
        self._styles[row // _DOT_ROWS][column // _DOT_COLUMNS] = style

    def line(self, points: Sequence[Point], style: str) -> None:
        """Straight lines from each point to the next."""
        for (x0, y0), (x1, y1) in pairwise(points):
            count = max(1, round(abs(x1 - x0) * self._width * _DOT_COLUMNS), round(abs(y1 - y0) * self._height * _DOT_ROWS))
            for index in range(count + 1):
                share = index / count
                self.dot(x0 + (x1 - x0) * share, y0 + (y1 - y0) * share, style)
        if len(points) == 1:
            self.dot(*points[0], style)

    def rows(self) -> list[Text]:
        """The rows from the top."""
        rows = []
        for bits, styles in zip(self._bits, self._styles, strict=True):
            row = Text(no_wrap=True)
            start = 0
            for end in range(1, self._width + 1):
                if end == self._width or styles[end] != styles[start]:
                    row.append("".join(chr(_BLANK | bit) if bit else " " for bit in bits[start:end]), styles[start])
                    start = end
            rows.append(row)
        return rows
