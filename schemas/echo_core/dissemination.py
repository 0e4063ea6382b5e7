"""How a snapshot could go from the learner to many workers: striped chains (ECHO-2 §4.2), and the star as their baseline. Pure.

    star       learner → a, learner → b, learner → c              the learner's line is shared by all
    chains     stripe 0: learner → a → b → c                      N stripes of 1/N of the bytes, each through every worker;
               stripe 1: learner → b → c → a                      each in another order; a worker hands a stripe on to one
               stripe 2: learner → c → a → b                      other at most, chunk by chunk, as the chunks arrive

The paper does not say how a worker whose chain carries one stripe gets the others; here every stripe passes every worker. These are plans
and predictions; `echo_rollout/weights/peers` transports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo_schemas.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A worker's connection, in bytes per second."""

    down: float
    up: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Everybody's connections. Raises UserError where one carries nothing."""

    learner_up: float
    """B_0, in bytes per second."""
    workers: Mapping[str, Line]
    latency_s: float = 0.0
    """From one machine to the next, of one chunk's first byte."""
    flow: float = math.inf
    """Bytes per second that one connection reaches, whatever the line could carry; far connections need several."""

    def __post_init__(self) -> None:
        speeds = [self.learner_up, self.flow, *(speed for line in self.workers.values() for speed in (line.down, line.up))]
        if min(speeds) <= 0 or self.latency_s < 0:
            raise UserError("Every line must carry something, and no latency is negative.", hint="Give bytes per second above 0.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relink:
    """A worker asks another parent for the rest of a stripe. `parent` None: the learner.

    The new parent was above the old one, so it has every chunk that the child lacks, or gets it before the child would have.
    """

    stripe: int
    child: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class StripedChains:
    """For each stripe the workers in the order in which it passes them. Raises UserError unless all have the same workers, each once."""

    chains: tuple[tuple[str, ...], ...]
    _members: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members = frozenset(self.chains[0]) if self.chains else frozenset()
        if not self.chains or any(len(chain) != len(members) or frozenset(chain) != members for chain in self.chains):
            raise UserError("Each stripe must pass every worker exactly once.", hint="Make the plan with plan_chains.")
        object.__setattr__(self, "_members", members)

    @property
    def workers(self) -> frozenset[str]:
        """Everybody who gets the snapshot."""
        return self._members

    def parent(self, stripe: int, worker: str) -> str | None:
        """Whom this worker gets the stripe from; None: the learner."""
        place = self.chains[stripe].index(worker)
        return self.chains[stripe][place - 1] if place else None

    def child(self, stripe: int, worker: str) -> str | None:
        """Whom this worker hands the stripe on to; None: nobody."""
        place = self.chains[stripe].index(worker)
        return self.chains[stripe][place + 1] if place + 1 < len(self.chains[stripe]) else None

    def without(self, worker: str) -> tuple[StripedChains, tuple[Relink, ...]]:
        """The plan after a worker has left: in each stripe its child takes over from its parent; at most one new link a stripe.

        Stripes a b c, b c a, c a b; b leaves: a c, c a, c a;
        stripe 0: c now asks a; stripe 1: c asks the learner; stripe 2: b was the last, nothing changes.
        """
        children = [self.child(stripe, worker) for stripe in range(len(self.chains))]
        links = tuple(
            Relink(stripe=stripe, child=child, parent=self.parent(stripe, worker))
            for stripe, child in enumerate(children)
            if child is not None
        )
        return StripedChains(tuple(tuple(each for each in chain if each != worker) for chain in self.chains)), links

    def joined(self, worker: str) -> tuple[StripedChains, tuple[Relink, ...]]:
        """The plan after a worker has come: it is the last of each stripe, so nobody else changes its parent."""
        if worker in self._members:
            raise UserError(f"The worker {worker!r} is in the plan already.")
        plan = StripedChains(tuple((*chain, worker) for chain in self.chains))
        links = (Relink(stripe=stripe, child=worker, parent=plan.parent(stripe, worker)) for stripe in range(len(self.chains)))
        return plan, tuple(links)


# The filling of the chains may take this share of a transfer: W workers hand on chunks of which one takes N / n of it on a line.
_FILLING = 0.25


def num_stripes(num_chunks: int, num_workers: int) -> int:
    """How many stripes to make of a snapshot: as many as workers, but fewer of a small one.

    72 chunks, 2 workers: 2 stripes; 8 workers: 72 · 0.25 / 8 = 2; 18,000 chunks, 9 workers: 9.
    """
    return max(1, min(num_workers, int(num_chunks * _FILLING / max(1, num_workers))))


def plan_chains(workers: Sequence[str], num_stripes: int) -> StripedChains:
    """Stripe j begins at the worker ⌊j·W/N⌋ and goes round, so that the beginnings are spread evenly; all orders differ while N ≤ W.

    Workers a b c d, two stripes: a b c d and c d a b; three: a b c d, b c d a, c d a b.
    Each worker is first in at most ⌈N/W⌉ stripes and last in at most ⌈N/W⌉.
    """
    if num_stripes < 1:
        raise UserError("A snapshot has at least one stripe.")
    starts = [stripe * len(workers) // num_stripes for stripe in range(num_stripes)]
    return StripedChains(tuple((*workers[start:], *workers[:start]) for start in starts))


def chains_s(plan: StripedChains, lines: Lines, num_bytes: float, num_chunks: int) -> float:
    """Seconds until the last worker has all stripes: the largest of `chain_arrivals_s`; 0 without workers."""
    return max(chain_arrivals_s(plan, lines, num_bytes, num_chunks).values(), default=0.0)


def chain_arrivals_s(plan: StripedChains, lines: Lines, num_bytes: float, num_chunks: int) -> dict[str, float]:
    """By worker, seconds until it has all stripes, each cut into `num_chunks` chunks of G / (N·n) bytes.

    A hop's speed is the least of what sender and receiver give each of N stripes (their lines divided evenly) and of one flow. Chunks of
    equal size have passed some hops of fixed speed after Σ t + (n − 1)·max t, t being a chunk's time on each of them; each hop adds the
    latency once.

    16.4 GB, nine workers of 12.5 MB/s both ways, a learner of 125 MB/s, one stripe of 164 chunks: a chunk takes 100 MB / 12.5 MB/s = 8 s;
    nine hops: 9 · 8 + 163 · 8 = 1376 s, the first worker has it after 1312 s. Twice the workers: 1448 s. The paper measured 1437 s, the
    loading of the weights included.
    """
    if num_chunks < 1 or num_bytes < 0:
        raise UserError("A stripe has at least one chunk, and a snapshot no negative size.")
    num_stripes = len(plan.chains)
    chunk = num_bytes / (num_stripes * num_chunks)
    found: dict[str, float] = {}
    for chain in plan.chains:
        passed_s = slowest_s = 0.0
        up = lines.learner_up
        for hop, worker in enumerate(chain, start=1):
            line = lines.workers[worker]
            chunk_s = chunk / min(up / num_stripes, line.down / num_stripes, lines.flow)
            passed_s, slowest_s, up = passed_s + chunk_s, max(slowest_s, chunk_s), line.up
            arrives_s = passed_s + (num_chunks - 1) * slowest_s + hop * lines.latency_s
            found[worker] = max(found.get(worker, 0.0), arrives_s)
    return found


def star_s(workers: Sequence[str], lines: Lines, num_bytes: float) -> float:
    """Seconds until the last worker has the snapshot: the largest of `star_arrivals_s`; 0 without workers."""
    return max(star_arrivals_s(workers, lines, num_bytes).values(), default=0.0)


def star_arrivals_s(workers: Sequence[str], lines: Lines, num_bytes: float) -> dict[str, float]:
    """By worker, seconds until it has the snapshot straight from the learner, whose line is divided evenly for as long as it takes.

    For equal workers this is exact; among unequal ones it is an upper bound, since the others get more when one has finished.

    16.4 GB to nine workers of 12.5 MB/s: a learner of 125 MB/s gives each 12.5 MB/s after all, 1312 s;
    one of 37.5 MB/s gives each 4.17 MB/s, 3936 s. Eighteen workers: 2362 s and 7872 s.
    """
    share = lines.learner_up / max(1, len(workers))
    return {worker: num_bytes / min(share, lines.workers[worker].down, lines.flow) + lines.latency_s for worker in workers}
