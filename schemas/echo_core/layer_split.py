"""Splits the layers of one model over several unequal devices: a pipeline, planned from memory and speed. Pure.

    layers   0 ────────────── 17 │ 17 ─────────── 31 │ 31 ── 36
    device   the fastest         │ one in the middle │ the slowest
             and the embedding   │                   │ and the output layer

1. As few devices as can hold the model: each further stage is a hop for every token.
2. Of the sets of so many devices, the one with the fastest slowest stage, because a pipeline is as fast as its slowest stage. The least
   such time T is found by bisection; a dynamic program over the devices gives the number of layers that n of them hold if none takes
   longer. 3. Water-filling: each further layer goes to the device that finishes it soonest, within its memory. The slowest stage then takes
   T, and the others are as even as whole layers allow.

Example: 10 layers of 1 GB, an embedding and an output layer of 1 GB each; devices of 8 GB at 10 TFLOPS and of 6 GB at 30 TFLOPS, all of
their memory for weights. Neither holds the model alone, so both are used. The second is three times as fast and is filled: 5 layers beside
one of the two ends. The first computes the other 5. The embedding takes no arithmetic and the output layer as much as a layer, so the slow
device comes first: layers 0 to 5, 1 ms a token; the fast one has 5 to 10 and the output layer, 0.4 ms.

Parallax (Gradient, src/scheduling) splits likewise, but chooses at random among equal numbers of stages.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from echo_schemas.errors import UserError

WEIGHTS_SHARE = 0.65
"""The share of a device's memory for weights, as in Parallax; the rest is for the KV cache, adapters and activations."""
_GB = 1e9
# A product with a weight is one multiplication and one addition.
_FLOPS_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device: memory in GB (10⁹ bytes), speed in 10¹² operations a second."""

    memory_gb: float
    tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of parameters. `layer`: of one decoder layer, the largest; `embedding`: held by the first stage; `head`: by the last."""

    num_layers: int
    layer: int
    embedding: int
    head: int
    bytes_per_parameter: int


@dataclass(frozen=True, slots=True)
class Stage:
    """`device`, its place in the list, holds the layers `start` ≤ layer < `end`."""

    device: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The stages from the first layer to the last. `slowest_s`: seconds of arithmetic of one token in the slowest stage."""

    stages: tuple[Stage, ...]
    slowest_s: float

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return tuple(stage.end - stage.start for stage in self.stages)


@dataclass(frozen=True, slots=True)
class _Seat:
    """A device in a place of the pipeline: room in layers, seconds for the ends that it holds, and seconds for each layer."""

    device: int
    is_first: bool
    is_last: bool
    room: int
    base_s: float
    layer_s: float

    def layers_within(self, limit_s: float) -> int:
        """The number of layers that it finishes within the limit."""
        low, high = 0, self.room
        # Compares the same times as other code: a division could round differently.
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.seconds(middle) <= limit_s else (low, middle - 1)
        return low

    def seconds(self, num_layers: int) -> float:
        """For one token."""
        return self.base_s + num_layers * self.layer_s


def split_layers(devices: Sequence[Device], model: ModelSize, *, weights_share: float = WEIGHTS_SHARE) -> LayerSplit:
    """The plan. Raises UserError if the devices together have no room for the model."""
    seats = [
        [_seat(number, device, model, weights_share, is_first=is_first, is_last=is_last) for is_first, is_last in _PLACES]
        for number, device in enumerate(devices)
    ]
    for num_stages in range(1, min(len(devices), model.num_layers) + 1):
        if _most_layers(seats, num_stages, math.inf)[0] >= model.num_layers:
            break
    else:
        raise UserError(
            _too_small(devices, model, weights_share), hint="Add a device to [rollout] devices, or use a smaller [policy] base."
        )
    times = sorted({seat.seconds(layers) for places in seats for seat in places for layers in range(1, seat.room + 1)})
    slowest_s = times[bisect_left(times, True, key=lambda limit_s: _most_layers(seats, num_stages, limit_s)[0] >= model.num_layers)]
    # The first holds the embedding, the last the output layer; the others stand as in the list.
    chosen = sorted(_most_layers(seats, num_stages, slowest_s)[1], key=lambda seat: (not seat.is_first, seat.is_last, seat.device))
    counts = _fill(chosen, model.num_layers)
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    stages = tuple(Stage(seat.device, end - count, end) for seat, count, end in zip(chosen, counts, ends, strict=True))
    return LayerSplit(stages, slowest_s)


_PLACES = ((False, False), (True, False), (False, True), (True, True))


def _seat(number: int, device: Device, model: ModelSize, share: float, *, is_first: bool, is_last: bool) -> _Seat:
    extra = is_first * model.embedding + is_last * model.head
    room = (device.memory_gb * _GB * share / model.bytes_per_parameter - extra) / model.layer
    second_per_parameter = _FLOPS_PER_PARAMETER / (device.tflops * 1e12)
    return _Seat(
        device=number,
        is_first=is_first,
        is_last=is_last,
        room=max(0, min(model.num_layers, math.floor(room))),
        # A lookup in the embedding takes no arithmetic.
        base_s=is_last * model.head * second_per_parameter,
        layer_s=model.layer * second_per_parameter,
    )


def _most_layers(seats: Sequence[Sequence[_Seat]], num_stages: int, limit_s: float) -> tuple[int, tuple[_Seat, ...]]:
    """The most layers that `num_stages` of the devices hold, each at least one and within `limit_s`, and these devices. Goes over the
    devices and keeps the best for each number of stages, with and without a first and a last stage."""
    best: dict[tuple[int, bool, bool], tuple[int, tuple[_Seat, ...]]] = {(0, False, False): (0, ())}
    for places in seats:
        grown = dict(best)
        for (count, has_first, has_last), (layers, taken) in best.items():
            for seat in places if count < num_stages else ():
                more = seat.layers_within(limit_s)
                # Only a stage that is alone is both the first and the last.
                fits = (seat.is_first and seat.is_last) == (num_stages == 1)
                if not more or not fits or (seat.is_first and has_first) or (seat.is_last and has_last):
                    continue
                key = (count + 1, has_first or seat.is_first, has_last or seat.is_last)
                if key not in grown or grown[key][0] < layers + more:
                    grown[key] = (layers + more, (*taken, seat))
        best = grown
    return best.get((num_stages, True, True), (0, ()))


def _fill(seats: Sequence[_Seat], num_layers: int) -> list[int]:
    """Layers for each seat: at least one; each further layer goes to the seat that finishes it soonest."""
    counts = [1] * len(seats)
    soonest = [(seat.seconds(2), place) for place, seat in enumerate(seats) if seat.room > 1]
    heapq.heapify(soonest)
    for _ in range(num_layers - len(seats)):
        _, place = heapq.heappop(soonest)
        counts[place] += 1
        if counts[place] < seats[place].room:
            heapq.heappush(soonest, (seats[place].seconds(counts[place] + 1), place))
    return counts


def _too_small(devices: Sequence[Device], model: ModelSize, share: float) -> str:
    needed = (model.num_layers * model.layer + model.embedding + model.head) * model.bytes_per_parameter / _GB
    held = sum(device.memory_gb for device in devices) * share
    return (
        f"[rollout] devices have {held:.3g} GB for weights ({share:.0%} of their memory), and the model's {model.num_layers} layers, its "
        f"embedding and its output layer, of {needed:.3g} GB, do not fit into them in whole layers."
    )
