"""The split of a model's layers over unequal devices: the page's example, and the best there is among all splits of small cases."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.layer_split import Device, ModelSize, Stage, split_layers
from echo_schemas.errors import UserError
from tests.thorough import examples

GB = 10**9


def model(num_layers: int, *, layer: int = 1, embedding: int = 0, head: int = 0) -> ModelSize:
    """Sizes in GB, of parameters of one byte."""
    return ModelSize(num_layers=num_layers, layer=layer * GB, embedding=embedding * GB, head=head * GB, bytes_per_parameter=1)


def test_the_example_of_the_module() -> None:
    devices = [Device(memory_gb=8, tflops=10), Device(memory_gb=6, tflops=30)]
    found = split_layers(devices, model(10, embedding=1, head=1), weights_share=1.0)
    assert found.stages == (Stage(0, 0, 5), Stage(1, 5, 10))
    assert found.layer_counts == (5, 5)
    assert found.slowest_s == pytest.approx(1e-3)


def test_a_model_that_fits_on_one_device_goes_to_the_fastest_that_holds_it() -> None:
    devices = [Device(memory_gb=4, tflops=90), Device(memory_gb=9, tflops=20), Device(memory_gb=8, tflops=40)]
    assert split_layers(devices, model(6), weights_share=1.0).stages == (Stage(2, 0, 6),)


def test_as_many_stages_as_are_needed_and_of_equal_ones_the_faster() -> None:
    """Parallax leaves which of two equal cards is used to their order."""
    slow, fast, other = Device(memory_gb=21, tflops=80), Device(memory_gb=21, tflops=165), Device(memory_gb=17, tflops=30)
    found = split_layers([slow, other, fast], model(36), weights_share=1.0)
    assert {stage.device for stage in found.stages} == {0, 2}
    assert sorted(found.layer_counts) == [15, 21], "the fast one is full, the slow one has the rest"


def test_within_their_memory_layers_go_by_speed() -> None:
    devices = [Device(memory_gb=20, tflops=30), Device(memory_gb=20, tflops=10), Device(memory_gb=20, tflops=10)]
    found = split_layers(devices, model(50), weights_share=1.0)
    assert dict(zip((stage.device for stage in found.stages), found.layer_counts, strict=True)) == {0: 20, 1: 15, 2: 15}


def test_devices_that_are_too_small_say_how_much_is_missing() -> None:
    with pytest.raises(UserError, match=r"have 6\.5 GB for weights \(65% of their memory\), and the model's 8 layers.*of 8 GB"):
        split_layers([Device(memory_gb=5, tflops=1), Device(memory_gb=5, tflops=1)], model(8))
    with pytest.raises(UserError, match="in whole layers"):
        split_layers([Device(memory_gb=3.5, tflops=1)] * 2, model(7), weights_share=1.0)


sizes = st.integers(0, 3)
cards = st.lists(st.builds(Device, memory_gb=st.integers(1, 7), tflops=st.sampled_from([1, 2, 3, 7])), min_size=1, max_size=4)


@settings(max_examples=examples(200))
@given(devices=cards, layers=st.integers(1, 7), embedding=sizes, head=sizes)
def test_no_split_has_fewer_stages_or_a_quicker_slowest_one(devices: list[Device], layers: int, embedding: int, head: int) -> None:
    size = model(layers, embedding=embedding, head=head)
    wanted = best_of_all(devices, size)
    if wanted is None:
        with pytest.raises(UserError):
            split_layers(devices, size, weights_share=1.0)
        return
    found = split_layers(devices, size, weights_share=1.0)
    assert [stage.start for stage in found.stages] == [0, *(stage.end for stage in found.stages[:-1])]
    assert found.stages[-1].end == layers
    order, counts = [stage.device for stage in found.stages], found.layer_counts
    assert len(set(order)) == len(order)
    seconds = slowest_of(devices, size, order, counts)
    assert seconds is not None, "a stage is larger than its device"
    assert len(order) == wanted[0]
    assert seconds == pytest.approx(wanted[1])
    assert found.slowest_s == pytest.approx(seconds)


def best_of_all(devices: list[Device], size: ModelSize) -> tuple[int, float] | None:
    """The least number of stages, and the least time of the slowest among all splits of as many, or None if there is no split."""
    for num_stages in range(1, len(devices) + 1):
        found = [
            seconds
            for order in itertools.permutations(range(len(devices)), num_stages)
            for cuts in itertools.combinations(range(1, size.num_layers), num_stages - 1)
            if (seconds := slowest_of(devices, size, order, [b - a for a, b in itertools.pairwise((0, *cuts, size.num_layers))]))
            is not None
        ]
        if found:
            return num_stages, min(found)
    return None


def slowest_of(
    devices: list[Device], size: ModelSize, order: tuple[int, ...] | list[int], counts: tuple[int, ...] | list[int]
) -> float | None:
    """Seconds of the slowest stage, None if one does not fit."""
    slowest = 0.0
    for place, (number, count) in enumerate(zip(order, counts, strict=True)):
        head = size.head if place == len(order) - 1 else 0
        held = count * size.layer + head + (size.embedding if place == 0 else 0)
        if held > devices[number].memory_gb * GB:
            return None
        slowest = max(slowest, 2 * (count * size.layer + head) / (devices[number].tflops * 1e12))
    return slowest if math.isfinite(slowest) else None
