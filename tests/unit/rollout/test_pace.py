"""The feeder's rules against any step times: under pace no group becomes too old, and a feeder that is replaced leaves no gap."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.closed_seqs import plan_resume
from echo_core.dispatch import may_issue, required_version
from echo_core.policy import StalenessPolicy
from echo_rollout.open_seqs import OpenSeqs, dispatch_state
from echo_schemas.columns import pack_seqs
from echo_schemas.records import Progress
from tests.thorough import examples

STEPS = 10
TIMES = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6)
LAGS = st.lists(st.floats(0.0, 8.0), min_size=1, max_size=6)


class Simulation:
    """A feeder, a worker that finishes groups in order, and a learner, each as fast as its list of times says, over and over.

    What the learner says reaches feeder and worker late. The worker generates under the oldest weights that a request allows.
    """

    def __init__(self, policy: StalenessPolicy, steps: list[float], groups: list[float], lags: list[float]) -> None:
        self._policy = policy
        self._step_s, self._group_s, self._lag_s = steps, groups, lags
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._seen: Progress | None = None
        self._latest_heard_s = 0.0
        self._is_generating = self._is_training = False
        self._requests: list[tuple[int, int]] = []
        self._ready: list[tuple[int, int]] = []
        self.issued: list[int] = []
        self._open = OpenSeqs()
        self._trained: set[int] = set()
        self.next_seq = 0
        self.version = 0
        self.oldest = 0

    def run(self, *, replace_feeder_at: frozenset[int] = frozenset()) -> None:
        """Until `STEPS` are trained. At each of `replace_feeder_at`, a number of events, another feeder takes over from the log."""
        self._hear(self._progress())
        for number in range(100_000):
            if self.version == STEPS:
                return
            if number in replace_feeder_at:
                floor = 0 if self._seen is None else self._seen.next_seq
                resume = plan_resume(floor, set(self.issued))
                assert not resume.missing
                self.next_seq = resume.next_seq
                self._open = OpenSeqs()
                for seq in self.issued:
                    self._open.issued(seq)
            assert self._events, f"the run stands still before step {self.version + 1}"
            self._now_s, _, happens = heapq.heappop(self._events)
            happens()
            self._issue()
            self._generate()
            self._train()
        raise AssertionError("the run does not end")

    def _issue(self) -> None:
        if self._seen is None:
            return
        self._open.hear(self._seen)
        while may_issue(state := dispatch_state(self._seen, self._open.undecided), self._policy):
            self._open.issued(self.next_seq)
            self._requests.append((self.next_seq, required_version(state, self._policy)))
            self.issued.append(self.next_seq)
            self.next_seq += 1

    def _generate(self) -> None:
        if self._requests and not self._is_generating:
            seq, version = self._requests.pop(0)
            self._is_generating = True

            def done() -> None:
                self._is_generating = False
                self._ready.append((version, seq))

            self._after(self._group_s[seq % len(self._group_s)], done)

    def _train(self) -> None:
        size = self._policy.groups_per_step
        if len(self._ready) >= size and not self._is_training:
            self._ready.sort()
            batch, self._ready = self._ready[:size], self._ready[size:]
            self.oldest = max([self.oldest, *(self.version - version for version, _ in batch)])
            self._is_training = True

            def done() -> None:
                self._is_training = False
                self.version += 1
                self._trained |= {seq for _, seq in batch}
                self._hear(self._progress())

            self._after(self._step_s[self.version % len(self._step_s)], done)

    def _progress(self) -> Progress:
        trained = self.version * self._policy.groups_per_step
        return Progress(
            run_id="demo",
            session="s",
            version=self.version,
            published=self.version - self.version % self._policy.publication_period,
            groups_trained=trained,
            groups_dropped=0,
            groups_ready=len(self._ready),
            next_seq=0,
            closed=pack_seqs(0, self._trained),
            time_ms=0,
        )

    def _hear(self, progress: Progress) -> None:
        """The feeder reads it later, never before what was said earlier."""
        self._latest_heard_s = max(self._latest_heard_s, self._now_s + self._lag_s[progress.version % len(self._lag_s)])

        def heard() -> None:
            self._seen = replace(progress)

        self._after(self._latest_heard_s - self._now_s, heard)

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now_s + seconds, self._num_events, happens))


def policy_of(budget: int, period: int, groups: int, slack: int) -> StalenessPolicy:
    period = min(period, budget + 1)
    return StalenessPolicy(
        budget=budget, publication_period=period, groups_per_step=groups, group_size=2, lead=max(period - 1, budget - slack)
    )


POLICIES = st.builds(policy_of, st.integers(0, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))


@settings(max_examples=examples(60))
@given(policy=POLICIES, steps=TIMES, groups=TIMES, lags=LAGS)
def test_whatever_steps_take_no_group_is_trained_beyond_the_budget(
    policy: StalenessPolicy, steps: list[float], groups: list[float], lags: list[float]
) -> None:
    simulation = Simulation(policy, steps, groups, lags)
    simulation.run()
    assert simulation.oldest <= policy.budget


@settings(max_examples=examples(30))
@given(policy=POLICIES, steps=TIMES, groups=TIMES, lags=LAGS, moments=st.frozensets(st.integers(0, 60), max_size=5))
def test_feeders_that_replace_one_another_issue_every_seq_once_and_keep_to_the_budget(
    policy: StalenessPolicy, steps: list[float], groups: list[float], lags: list[float], moments: frozenset[int]
) -> None:
    simulation = Simulation(policy, steps, groups, lags)
    simulation.run(replace_feeder_at=moments)
    assert simulation.issued == list(range(simulation.next_seq))
    assert simulation.oldest <= policy.budget
