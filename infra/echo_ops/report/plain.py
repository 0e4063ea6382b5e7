"""The run as lines of text for a log or a pipe: one for each milestone, one for each step. Pure; the caller prints them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from echo_core.bottleneck import describe
from echo_ops.report.evaluations import evaluation_line
from echo_ops.report.run_view import Milestone, RunView, Step
from echo_ops.report.summary import or_dash
from echo_ops.rewards.watch import ScorerLine, ScorerState

# Steps between two sentences about the bottleneck.
_SENTENCE_EVERY = 20


class PlainLines:
    """Remembers the lines already given."""

    def __init__(self) -> None:
        self._milestones: set[Milestone] = set()
        self._steps = 0
        self._evaluations = 0
        self._epoch = -1
        self._scorers: dict[tuple[str, str], tuple[ScorerState, float]] = {}

    def news(self, view: RunView) -> Iterator[str]:
        """The lines since the last call."""
        for milestone, time_s in sorted(view.milestones.items(), key=lambda item: item[1]):
            if milestone not in self._milestones:
                self._milestones.add(milestone)
                yield f"{time_s:6.1f} s  {view.words_of(milestone)}"
        means = view.mean_rewards()
        for step, mean in zip(view.steps[self._steps :], means[self._steps :], strict=True):
            yield step_line(step, mean, view.steps_wanted)
            if step.number % _SENTENCE_EVERY == 0:
                yield f"{'':9} {describe(view.bottleneck(recent=True))}"
        self._steps = len(view.steps)
        results = view.evaluations.all
        for result in results[self._evaluations :]:
            yield f"{(result.time_ms - view.started_ms) / 1000:6.1f} s  {evaluation_line(result)}"
        self._evaluations = len(results)
        for decision in view.decisions:
            if decision.epoch > self._epoch:
                self._epoch = decision.epoch
                yield f"{decision.time_s:6.1f} s  coordinator: {decision.in_words()}"
        for line in view.scorers:
            # Being behind changes often, so only the screen shows it.
            now = (line.state if line.state in {ScorerState.GONE, ScorerState.DETACHED} else ScorerState.SCORING, line.weight)
            if self._scorers.get((line.application, line.name)) != now:
                self._scorers[line.application, line.name] = now
                yield scorer_line(line)


def scorer_line(line: ScorerLine) -> str:
    """`reward my_rewards.py:brevity (brevity): scoring, a shadow, mean 0.125`; with weight also the policy for missing rewards."""
    role = f"weight {line.weight:g}, {line.policy}" if line.weight else "a shadow, no group waits"
    said = "" if line.mean is None else f", mean {line.mean:.3f}"
    return f"{'':9} reward {line.name} ({line.application}): {line.state.value}, {role}{said}"


def step_line(step: Step, mean: float, wanted: int) -> str:
    """`12.4 s  step 3/100  reward 0.221 (mean of 10: 0.214)  staleness max 2  waited 0.02 s  trained 0.41 s`."""
    of = f"/{wanted}" if wanted else ""
    oldest = max((age for age, count in enumerate(step.staleness) if count), default=0)
    return (
        f"{step.time_s:6.1f} s  step {step.number}{of}  reward {step.reward:.3f} (mean of 10: {mean:.3f})  staleness max {oldest}  "
        f"waited {step.idle_s:.2f} s  trained {step.training_s:.2f} s"
    )


def _asked_line(asked: Mapping[str, int]) -> str:
    """A sequential learner's requests, and its receipts by kind."""
    fates = {name.removeprefix("replies_"): count for name, count in asked.items() if name.startswith("replies_") and count}
    said = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "none"
    again = f", {asked['requests_resent']} of them again" if asked.get("requests_resent") else ""
    return f"requests: {asked.get('requests_sent', 0)}{again}; receipts: {said}"


def closing_lines(summary: Mapping[str, Any], reward_name: str) -> list[str]:
    """Six to eight lines for the end, and one for each worker if there are several."""

    def number(key: str, form: str) -> str:
        return or_dash(summary[key], form)

    took = (
        f"{summary['outcome']}: {summary['steps']} steps in {number('wall_seconds', '.0f')} s, the first after "
        f"{number('seconds_to_first_step', '.1f')} s, then {number('s_per_step', '.2f')} s a step"
    )
    reward = f"{reward_name}: {number('reward_first', '.3f')} → {number('reward_last', '.3f')} (means of the first and last ten steps)"
    why = ", ".join(f"{count} {reason}" for reason, count in summary["dropped"].items())
    waits = (
        f"weights reach the workers in {number('t_bcast_p50_s', '.3f')} s (median); learner idle {number('bubble_ratio', '.1%')}, "
        f"outside compute {number('learner_outside_compute', '.1%')}"
    )
    agreement = (
        f"learner and worker differ by {number('logprob_max_diff', '.1e')} at most in log-probability "
        f"({number('logprob_samples', 'd')} samples compared)"
    )
    workers = summary["workers"]
    return [
        took,
        reward + (f"; 0.70 after {number('seconds_to_070', '.0f')} s" if summary["seconds_to_070"] is not None else ""),
        f"trajectories: {summary['trajectories_published']} published, {summary['trajectories_trained']} trained; "
        + (f"dropped: {why}" if why else "none dropped"),
        f"staleness: {number('staleness_mean', '.2f')} on average, {number('max_staleness', 'd')} at most",
        *([_asked_line(summary["asked"])] if summary["asked"] else []),
        waits,
        *(_worker_line(line) for line in workers if len(workers) > 1),
        *([cost_line(summary["cost"])] if summary["cost"] is not None else []),
        agreement,
        summary["bottleneck"]["sentence"],
        *([summary["disbelief"]] if summary["disbelief"] else []),
    ]


def cost_line(cost: Mapping[str, Any]) -> str:
    """`cost: 1.25 in all, 0.0125 a step, 0.024 per 1,000 trained samples; learner 0.4, workers 0.85 (idle 0.1, standby 0.05)`."""
    return (
        f"cost: {cost['total']:.4g} in all, {or_dash(cost['per_step'], '.4g')} a step, {or_dash(cost['per_1000_trained'], '.4g')} "
        f"per 1,000 trained samples; learner {cost['learner']:.4g}, workers {cost['workers']:.4g} "
        f"(idle {cost['idle']:.4g}, standby {cost['standby']:.4g})"
    )


def _worker_line(line: Mapping[str, Any]) -> str:
    """`worker-slow-0 (slow, transformers): 18% of the work, 4.1 samples/s, staleness 1.20 on average, idle 3%, 0.12 per 1,000`."""
    parts = [
        f"{or_dash(line['share'], '.0%')} of the work",
        f"{or_dash(line['samples_per_s'], '.1f')} samples/s",
        f"staleness {or_dash(line['staleness_mean'], '.2f')} on average",
        f"idle {or_dash(line['idle_share'], '.0%')}",
    ]
    if line["price_per_hour"]:
        parts.append(f"{or_dash(line['cost_per_1000'], '.3g')} per 1,000 trajectories")
    what = f"{line['kind']}, {line['engine']}" if line["kind"] else line["engine"]
    return f"{line['worker_id']} ({what}): {', '.join(parts)}"
