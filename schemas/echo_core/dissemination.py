"""Plans for sending a snapshot from the learner to many workers: striped chains (ECHO-2 §4.2), and the star as their baseline. Pure.

    star       learner → a, learner → b, learner → c              all share the learner's line
    chains     stripe 0: learner → a → b → c                      N stripes of 1/N of the bytes, each through every worker,
               stripe 1: learner → b → c → a                      each in another order; a worker forwards a stripe to at most
               stripe 2: learner → c → a → b                      one other worker, chunk by chunk, as the chunks arrive

The paper does not say how a worker whose chain carries one stripe gets the others; here every stripe passes every worker. This module plans
and predicts; `echo_rollout/weights/peers` transfers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_schemas.errors import UserError

Chains = tuple[tuple[str, ...], ...]
"""For each stripe the workers in the order in which it passes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A worker's connection, in bytes per second."""

    down: float
    up: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The connections of learner and workers. Raises UserError for one without capacity."""

    learner_up: float
    """B_0, in bytes per second."""
    workers: Mapping[str, Line]
    latency_s: float = 0.0
    """Of one chunk's first byte, from one machine to the next."""
    flow: float = math.inf
    """The largest bytes per second of one connection, also on a faster line; a distant machine needs several connections."""

    def __post_init__(self) -> None:
        speeds = [self.learner_up, self.flow, *(speed for line in self.workers.values() for speed in (line.down, line.up))]
        if min(speeds) <= 0 or self.latency_s < 0:
            raise UserError("Every line must carry something, and no latency is negative.", hint="Give bytes per second above 0.")


# Filling the chains may take this share of a transfer: W workers forward chunks, each of which takes N / n of it on a line.
_FILLING = 0.25


def num_stripes(num_chunks: int, num_workers: int) -> int:
    """The number of stripes of a snapshot: one for each worker, fewer for a small snapshot.

    72 chunks, 2 workers: 2 stripes; 8 workers: 72 · 0.25 / 8 = 2; 18,000 chunks, 9 workers: 9."""
    return max(1, min(num_workers, int(num_chunks * _FILLING / max(1, num_workers))))


def plan_chains(workers: Sequence[str], num_stripes: int) -> Chains:
    """Stripe j begins at the worker ⌊j·W/N⌋ and goes round, so that the first workers are spread evenly; all orders differ while N ≤ W.
    Workers a b c d, two stripes: a b c d and c d a b; three: a b c d, b c d a, c d a b. Each worker is first in at most ⌈N/W⌉ stripes and
    last in at most ⌈N/W⌉."""
    if num_stripes < 1:
        raise UserError("A snapshot has at least one stripe.")
    starts = [stripe * len(workers) // num_stripes for stripe in range(num_stripes)]
    return tuple((*workers[start:], *workers[:start]) for start in starts)


def chain_arrivals_s(chains: Chains, lines: Lines, num_bytes: float, num_chunks: int) -> dict[str, float]:
    """By worker, seconds until it has all stripes, each cut into `num_chunks` chunks of G / (N·n) bytes.

    The speed of a hop is the least of: the sender's line / N, the receiver's line / N, one flow. n chunks of equal size pass hops of fixed
    speed in Σ t + (n − 1)·max t, where t is a chunk's time on a hop; each hop adds the latency once.

    16.4 GB, nine workers of 12.5 MB/s both ways, a learner of 125 MB/s, one stripe of 164 chunks: a chunk takes 100 MB / 12.5 MB/s = 8 s;
    nine hops: 9 · 8 + 163 · 8 = 1376 s, the first worker has it after 1312 s. Twice the workers: 1448 s. The paper measured 1437 s, the
    loading of the weights included.
    """
    if num_chunks < 1 or num_bytes < 0:
        raise UserError("A stripe has at least one chunk, and a snapshot no negative size.")
    num_stripes = len(chains)
    chunk = num_bytes / (num_stripes * num_chunks)
    found: dict[str, float] = {}
    for chain in chains:
        passed_s = slowest_s = 0.0
        up = lines.learner_up
        for hop, worker in enumerate(chain, start=1):
            line = lines.workers[worker]
            chunk_s = chunk / min(up / num_stripes, line.down / num_stripes, lines.flow)
            passed_s, slowest_s, up = passed_s + chunk_s, max(slowest_s, chunk_s), line.up
            arrives_s = passed_s + (num_chunks - 1) * slowest_s + hop * lines.latency_s
            found[worker] = max(found.get(worker, 0.0), arrives_s)
    return found


def star_arrivals_s(workers: Sequence[str], lines: Lines, num_bytes: float) -> dict[str, float]:
    """By worker, seconds until it has the snapshot straight from the learner, whose line is always divided evenly among all workers.

    Exact for equal workers; else an upper bound, because the others get more when one has finished.

    16.4 GB to nine workers of 12.5 MB/s: a learner of 125 MB/s gives each 12.5 MB/s after all, 1312 s;
    one of 37.5 MB/s gives each 4.17 MB/s, 3936 s. Eighteen workers: 2362 s and 7872 s.
    """
    share = lines.learner_up / max(1, len(workers))
    return {worker: num_bytes / min(share, lines.workers[worker].down, lines.flow) + lines.latency_s for worker in workers}
