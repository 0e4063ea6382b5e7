"""A learner and its workers as events in simulated time (simpy), under the rules and estimates of a live run. Pure: a seed, no clock.

    learner       forms a batch, trains for T_train, publishes every kappa steps
    machine       comes, fails or is preempted, comes back
    group         issued to a free place (`dispatch`), generated, delivered
    coordinator   looks every `every_s`, orders (`capacity.decision`)

A group has one age: its members start together, under one version. An engine ends a group under the weights that it began it with.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Generator
from typing import Any

import simpy

from echo_core.batch_choice import weight_of
from echo_core.capacity.decision import PoolLook, PoolRule
from echo_core.capacity.estimates import BroadcastWatch, KnownRates, RecentMedian, heartbeat_patience_s
from echo_core.dispatch import DispatchState, may_issue, required_version
from echo_core.policy import OverBudget
from echo_core.simulation.machines import Group, Machine
from echo_core.simulation.outcome import Outcome, StepRecord
from echo_core.simulation.pool import ChosenAnew, decider_of, first_active
from echo_core.simulation.scenario import SECONDS_PER_DAY, BatchOrder, Scenario
from echo_core.simulation.tally import Tally
from echo_core.simulation.weights import arrivals_s, demand_of
from echo_core.staleness import Freshness, freshness

Events = Generator[Any, Any, None]

_SECONDS_PER_HOUR = 3600.0
# Ends a simulation whose learner waits without an end: after so many times the time that the steps would take.
_PATIENCE = 20
_SQRT_2 = math.sqrt(2)


def simulate(scenario: Scenario) -> Outcome:
    """Run the scenario until its steps are trained, or the learner has waited for twenty times as long as they would take.

    Raises UserError if weights never arrive before the next ones.

    R = 100 rollouts a step, T_train = 100 s, weights at once, one worker of 0.5 rollouts/s: a step takes 200 s, the bubble is one half.
    """
    return _Fleet(scenario).run()


class _Fleet:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._policy = scenario, scenario.policy
        self._demand = demand_of(scenario)
        self._env = simpy.Environment()
        self._random = random.Random(scenario.seed)
        self._machines = {
            f"{kind.name}-{number}": Machine(f"{kind.name}-{number}", kind) for kind in scenario.kinds for number in range(kind.count)
        }
        # Measurements of the run, as the coordinator makes them.
        self._train_s, self._broadcast_s, self._rates = RecentMedian(), RecentMedian(), KnownRates()
        self._watch = BroadcastWatch(gamma=scenario.pool.gamma)
        self._patience_s = heartbeat_patience_s(scenario.heartbeat_s)
        # The learner, and the groups ready for it: by the version that made them, each a heap by seq.
        self._version = self._published = self._undecided = self._num_ready = 0
        self._ready: dict[int, list[tuple[int, Group]]] = {}
        self._woken: simpy.Event | None = None
        self._finished = self._env.event()
        # Returned requests, and free places for a group: each the machine and its stay.
        self._returned: deque[Group] = deque()
        self._idle: deque[tuple[Machine, int]] = deque()
        self._next_seq = 0
        self._tally = Tally()

    def run(self) -> Outcome:
        """See `simulate`."""
        scenario, env = self._scenario, self._env
        active = first_active(scenario, self._demand)
        for machine in self._machines.values():
            machine.is_active = machine.worker_id in active
            env.process(self._life(machine))
        env.process(self._learn())
        decider = decider_of(scenario, self._demand)
        if decider is not None:
            env.process(self._coordinate(decider))
        latest_s = _PATIENCE * (scenario.steps + scenario.num_warmup) * (scenario.train_s + self._demand.broadcast_s)
        env.run(until=self._finished | env.timeout(latest_s))
        return self._outcome()

    # The learner

    def _learn(self) -> Events:
        env, scenario = self._env, self._scenario
        while self._version < scenario.steps + scenario.num_warmup:
            if self._version == scenario.num_warmup:
                self._count_from_here()
            waits_from_s = env.now
            while (batch := self._form_batch()) is None:
                self._woken = env.event()
                self._issue()
                yield self._woken
            spread = scenario.train_spread
            began_s, training_s = env.now, scenario.train_s * (self._random.uniform(1 - spread, 1 + spread) if spread else 1.0)
            yield env.timeout(training_s)
            self._train_s.add(training_s)
            self._tally.trained(
                StepRecord(
                    version=self._version,
                    began_s=began_s,
                    waited_s=began_s - waits_from_s,
                    training_s=training_s,
                    ages=Counter(self._version - version for version, _ in batch),
                ),
                [(group, weight_of(self._version - version, self._policy.over_budget, self._policy.budget)) for version, group in batch],
            )
            self._version += 1
            self._undecided -= len(batch)
            if self._version % self._policy.publication_period == 0:
                self._publish()
            self._issue()
        self._finished.succeed()

    def _form_batch(self) -> list[tuple[int, Group]] | None:
        """The next step's groups with their versions; None while there are too few. Drops groups that are too old. As `choose_batch` for
        groups of one age: under `withhold`, too, a group without a trained sample is refused whole."""
        policy = self._policy
        if policy.over_budget is not OverBudget.DOWNWEIGHT:
            for version in [each for each in self._ready if freshness(self._version, each, policy.budget) is Freshness.STALE]:
                stale = self._ready.pop(version)
                self._num_ready -= len(stale)
                self._undecided -= len(stale)
                self._tally.num_stale += len(stale)
        if self._num_ready < policy.groups_per_step:
            return None
        batch: list[tuple[int, Group]] = []
        for version in sorted(self._ready, reverse=self._scenario.order is BatchOrder.NEWEST_FIRST):
            heap = self._ready[version]
            while heap and len(batch) < policy.groups_per_step:
                batch.append((version, heapq.heappop(heap)[1]))
            if not heap:
                del self._ready[version]
        self._num_ready -= len(batch)
        return batch

    def _publish(self) -> None:
        """Send the newest weights to every engine that runs."""
        version = self._published = self._version
        receivers = {machine.worker_id: machine.kind.line for machine in self._machines.values() if machine.is_on}
        num_active = sum(machine.is_on and machine.is_active for machine in self._machines.values())
        self._watch.ready(version, num_active, self._env.now)
        together: dict[float, list[Machine]] = {}
        for worker_id, seconds in arrivals_s(self._scenario.weights, receivers).items():
            together.setdefault(seconds, []).append(self._machines[worker_id])
        for seconds, machines in together.items():
            self._after(seconds, self._arrived, [(machine, machine.life) for machine in machines], version)

    # Workers

    def _life(self, machine: Machine) -> Events:
        """The process of one machine: it comes, fails or is preempted, and comes back."""
        env, kind = self._env, machine.kind
        failing, preempting = kind.failures_per_day / SECONDS_PER_DAY, kind.preemptions_per_day / SECONDS_PER_DAY
        if kind.joins_s:
            yield env.timeout(kind.joins_s)
        while True:
            machine.is_there = True
            if machine.is_active:
                self._start(machine)
            if failing + preempting <= 0:
                return
            yield env.timeout(self._random.expovariate(failing + preempting))
            is_told = self._random.random() * (failing + preempting) >= failing
            if is_told:
                machine.stop_taking()
                yield env.timeout(kind.notice_s)
            self._lose(machine, after_s=0.0 if is_told else self._scenario.redelivery_s)
            yield env.timeout(self._random.expovariate(1.0) * (kind.away_s if is_told else kind.repair_s))

    def _start(self, machine: Machine) -> None:
        """An engine starts and fetches the newest weights; at version 0 it already has them."""
        machine.settle(self._env.now)
        machine.start()
        way_s = 0.0
        if self._version:
            way_s = arrivals_s(self._scenario.weights, {machine.worker_id: machine.kind.line})[machine.worker_id]
        self._after(machine.kind.start_s + way_s, self._arrived, [(machine, machine.life)], self._published)

    def _lose(self, machine: Machine, *, after_s: float) -> None:
        """A machine is gone without notice; others get its requests `after_s` later."""
        machine.settle(self._env.now)
        if machine.installed is not None:
            machine.lost_s = self._env.now
        machine.stop_taking()
        machine.is_there = machine.is_on = False
        machine.installed = None
        self._after(after_s, self._return, machine.hand_back())

    def _return(self, groups: list[Group]) -> None:
        self._tally.num_redelivered += len(groups)
        self._returned.extend(groups)
        self._issue()

    def _arrived(self, machines: list[tuple[Machine, int]], version: int) -> None:
        """These machines have received the weights, unless they were lost meanwhile."""
        for machine, life in machines:
            if life != machine.life or not machine.is_on:
                continue
            is_first = machine.installed is None
            machine.installed = max(version, -1 if machine.installed is None else machine.installed)
            if machine.is_active:
                measured_s = self._watch.installed(machine.worker_id, machine.installed, self._env.now)
                if measured_s is not None:
                    self._broadcast_s.add(measured_s)
                    self._tally.broadcasts_s.append(measured_s)
            if is_first and machine.is_active:
                self._take(machine)
            self._offer(machine, machine.num_parked)
            machine.num_parked = 0
        self._issue()

    def _take(self, machine: Machine) -> None:
        """The machine takes requests from now on."""
        machine.is_taking = True
        self._offer(machine, machine.kind.groups_at_once - len(machine.in_hand))

    def _offer(self, machine: Machine, places: int) -> None:
        self._idle.extend([(machine, machine.stay)] * places)

    def _issue(self) -> None:
        """Give requests to free places, while the learner admits more."""
        while self._idle:
            state = DispatchState(version=self._version, published=self._published, undecided=self._undecided)
            if self._returned:
                required = self._returned[0].required
            elif may_issue(state, self._policy):
                required = required_version(state, self._policy) if self._scenario.generation.on_old_weights else self._published
            else:
                return
            machine = self._place(required)
            if machine is None:
                return
            self._generate(machine, self._returned.popleft() if self._returned else self._new_group(required))

    def _place(self, required: int) -> Machine | None:
        """The machine of the place that has been free the longest and whose weights suffice; others wait for newer weights."""
        while self._idle:
            machine, stay = self._idle.popleft()
            if stay != machine.stay or not machine.is_taking or machine.kind.rate <= 0 or machine.installed is None:
                continue
            if machine.installed >= required:
                return machine
            machine.num_parked += 1
        return None

    def _new_group(self, required: int) -> Group:
        """A group whose length and difficulty come from two normal variables with the scenario's correlation."""
        generation, seq = self._scenario.generation, self._next_seq
        self._next_seq += 1
        self._undecided += 1
        if not generation.tail:
            group = Group(seq, 1.0, 0.5, required)
        else:
            one, other = self._random.gauss(), self._random.gauss()
            hard = generation.hardness * one + math.sqrt(1 - generation.hardness**2) * other
            length = math.exp(generation.tail * one - generation.tail**2 / 2)
            group = Group(seq, length, 0.5 * (1 + math.erf(hard / _SQRT_2)), required)
        self._tally.asked.add(group)
        return group

    def _generate(self, machine: Machine, group: Group) -> None:
        kind, now_s = machine.kind, self._env.now
        machine.settle(now_s)
        seconds = kind.groups_at_once * self._policy.group_size / kind.rate * group.length
        event = self._env.timeout(seconds)
        event.callbacks.append(lambda ended: self._generated(ended, machine, group))
        machine.in_hand[group.seq] = event, group, machine.installed or 0, now_s + seconds

    def _generated(self, event: simpy.Event, machine: Machine, group: Group) -> None:
        held = machine.in_hand.get(group.seq)
        if held is None or held[0] is not event:
            return
        machine.settle(self._env.now, self._policy.group_size)
        del machine.in_hand[group.seq]
        score_s = self._scenario.generation.score_s
        if score_s:
            self._after(score_s, self._deliver, group, held[2])
        else:
            self._deliver(group, held[2])
        if machine.is_taking:
            self._offer(machine, 1)
        elif not machine.in_hand:
            self._rest(machine)
        self._issue()

    def _deliver(self, group: Group, version: int) -> None:
        """The group and its rewards reach the learner."""
        heapq.heappush(self._ready.setdefault(version, []), (group.seq, group))
        self._num_ready += 1
        if self._woken is not None and self._num_ready >= self._policy.groups_per_step:
            woken, self._woken = self._woken, None
            woken.succeed()

    # The coordinator

    def _coordinate(self, decider: PoolRule | ChosenAnew) -> Events:
        while True:
            yield self._env.timeout(self._scenario.every_s)
            for worker_id, is_active in decider.decide(self._look()).orders.items():
                self._order(self._machines[worker_id], is_active)

    def _look(self) -> PoolLook:
        now_s, heard = self._env.now, []
        for machine in self._machines.values():
            is_returned = machine.is_there and not machine.is_on
            if is_returned or machine.is_heard(now_s, self._patience_s):
                machine.settle(now_s)
                heard.append(machine)
        rates = self._rates.update({machine.worker_id: machine.speed.samples_per_s for machine in heard})
        return PoolLook(
            train_s=self._train_s.value, broadcast_s=self._broadcast_s.value, workers=[each.shown(rates[each.worker_id]) for each in heard]
        )

    def _order(self, machine: Machine, is_active: bool) -> None:
        self._tally.num_orders[is_active] += 1
        machine.settle(self._env.now)
        machine.is_active = is_active
        if not is_active:
            machine.stop_taking()
            if machine.in_hand:
                self._after(self._scenario.pool.release_s, self._released, machine, machine.stay)
            else:
                self._rest(machine)
        elif machine.is_on and machine.installed is not None:
            self._take(machine)
            self._issue()
        elif machine.is_there and not machine.is_on:
            self._start(machine)

    def _released(self, machine: Machine, stay: int) -> None:
        """The time to finish its groups in hand is over."""
        if stay == machine.stay and not machine.is_active:
            machine.settle(self._env.now)
            self._return(machine.hand_back())
            self._rest(machine)

    def _rest(self, machine: Machine) -> None:
        """A released worker has no group in hand any more: its machine is returned, unless machines are kept on standby."""
        if not machine.is_active and machine.is_on and not self._scenario.pool.standby_kept:
            machine.settle(self._env.now)
            machine.is_on, machine.installed = False, None

    # Helpers

    def _after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        """Call `do` with `arguments` after `seconds`."""
        self._env.timeout(seconds).callbacks.append(lambda _: do(*arguments))

    def _count_from_here(self) -> None:
        for machine in self._machines.values():
            machine.settle(self._env.now)
            machine.paid_s = machine.busy_s = 0.0
        self._tally = Tally(began_s=self._env.now)

    def _outcome(self) -> Outcome:
        for machine in self._machines.values():
            machine.settle(self._env.now)
        scenario, seconds = self._scenario, self._env.now - self._tally.began_s
        spent, idle = dict.fromkeys((kind.name for kind in scenario.kinds), 0.0), 0.0
        for machine in self._machines.values():
            price = machine.kind.price_per_hour / _SECONDS_PER_HOUR
            spent[machine.kind.name] += machine.paid_s * price
            idle += (machine.paid_s - machine.busy_s) * price
        return self._tally.outcome(
            wanted_steps=scenario.steps,
            seconds=seconds,
            rollouts_per_step=self._demand.rollouts,
            cost=math.fsum(spent.values()) + seconds * scenario.learner_price_per_hour / _SECONDS_PER_HOUR,
            cost_by_kind=spent,
            idle_cost=idle,
            mean_active=math.fsum(machine.paid_s for machine in self._machines.values()) / seconds if seconds else 0.0,
        )
