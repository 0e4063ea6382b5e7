"""The formulas of `echo_core.needs`: their worked examples, and what must hold whatever the numbers are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from echo_core.capacity.overlap import Demand, needed_rate
from echo_core.needs.amounts import figure, money, seconds, size, whole_seconds
from echo_core.needs.arrival import arrival_limit_s, least_mbit_s, least_period_and_budget
from echo_core.needs.disk import checkpoint_bytes, disk_need
from echo_core.needs.fitting import least_change
from echo_core.needs.memory import LearnerLoad, WorkerLoad, learner_memory, worker_memory
from echo_core.needs.model_shape import PUBLISHED, published_shape, shape_of_config
from echo_core.needs.renting import SequentialRun, generation_s, holds_both
from echo_core.needs.speed import GPUS, Workload, rollouts_per_s, train_s
from echo_core.needs.traffic import Retention, StepTraffic, bytes_per_step, kept_bytes
from echo_schemas.errors import UserError

QWEN3_8B = PUBLISHED["Qwen3-8B"]
A100, H100, RTX_5090 = (next(gpu for gpu in GPUS if gpu.name.startswith(name)) for name in ("A100", "H100", "RTX 5090"))
RANK = LearnerLoad(
    dtype="bfloat16", adapter_rank=0, tokens=16_384, ranks=4, stage=3, recomputes=True, has_reference=False, copies=5, cuts=False
)
WORKER = WorkerLoad(dtype="bfloat16", adapter_rank=0, sequences=64, length=9216)
WORK = Workload(rollouts=2048, prompt_tokens=256, answer_tokens=4096, updates=2, recomputes=True)
STEP = StepTraffic(
    groups=128, group_size=16, prompt_tokens=256, answer_tokens=4096, rewards=1, publication_period=2, snapshot_bytes=16_400_000_000,
    through_log=True,
)  # fmt: skip


def test_a_model_s_weights_are_counted_one_by_one() -> None:
    """Against the safetensors of the published models."""
    counted = {name: shape.parameters for name, shape in PUBLISHED.items()}
    assert counted["Qwen3-8B"] == 8_190_735_360
    assert counted["Qwen2.5-0.5B"] == 494_032_768
    assert counted["Qwen2.5-7B"] == 7_615_616_512
    assert counted["Qwen3-0.6B"] == 596_049_920
    assert counted["Qwen3-30B-A3B"] == 30_532_122_624
    assert PUBLISHED["Qwen3-30B-A3B"].active_parameters == pytest.approx(3.04e9, rel=1e-2)
    assert QWEN3_8B.adapter_parameters(32) == 87_293_952
    assert QWEN3_8B.cache_bytes(2) == 147_456


def test_variants_have_the_shape_of_their_model_and_strangers_none() -> None:
    assert published_shape("models/Qwen3-30B-A3B-Thinking-2507/") == PUBLISHED["Qwen3-30B-A3B"]
    assert published_shape("Qwen/Qwen2.5-7B-Instruct") == PUBLISHED["Qwen2.5-7B"]
    assert published_shape("models/Qwen3-8Bx") is None
    assert published_shape("models/Llama-3-8B") is None


def test_a_config_says_the_shape() -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151_936, "tie_word_embeddings": False,
    }  # fmt: skip
    assert shape_of_config(config) == QWEN3_8B
    assert shape_of_config({"text_config": config, "model_type": "gemma3", "tie_word_embeddings": True}) == replace(QWEN3_8B, is_tied=True)
    with pytest.raises(UserError, match=r"does not say its shape: KeyError 'num_hidden_layers'"):
        shape_of_config({name: value for name, value in config.items() if name != "num_hidden_layers"})


def test_the_learner_of_the_example_needs_what_it_says() -> None:
    found = learner_memory(QWEN3_8B, RANK)
    parts = [found.weights, found.optimizer, found.activations, found.logits]
    assert [round(part / 1e9, 2) for part in parts] == [4.1, 32.76, 7.85, 1.07]
    assert found.total / 1e9 == pytest.approx(51.9, abs=0.2)


def test_each_saving_saves() -> None:
    whole = replace(RANK, stage=0, recomputes=False)
    totals = [
        learner_memory(QWEN3_8B, load).total
        for load in (whole, *(replace(whole, stage=stage) for stage in (1, 2, 3)), RANK, replace(RANK, adapter_rank=32))
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    offloading = learner_memory(QWEN3_8B, replace(RANK, offloads=True))
    assert (offloading.optimizer, offloading.host) == (0, learner_memory(QWEN3_8B, RANK).optimizer)
    assert learner_memory(QWEN3_8B, replace(RANK, has_reference=True)).reference == 2 * QWEN3_8B.parameters
    assert learner_memory(QWEN3_8B, replace(RANK, adapter_rank=32, has_reference=True)).reference == 0, "the adapter is switched off"


@pytest.mark.parametrize(
    ("name", "is_adapter", "recomputes", "compiles", "measured"),
    [
        ("Qwen2.5-0.5B", True, True, False, 41_970),
        ("Qwen2.5-0.5B", True, True, True, 55_588),
        ("Qwen2.5-0.5B", True, False, False, 52_672),
        ("Qwen2.5-0.5B", False, True, False, 47_879),
        ("Qwen2.5-0.5B", False, True, True, 60_959),
        ("Qwen3-4B", True, True, False, 9_893),
        ("Qwen3-4B", True, True, True, 15_564),
    ],
)
def test_steps_measured_on_an_h100_are_met_within_an_eighth(
    name: str, *, is_adapter: bool, recomputes: bool, compiles: bool, measured: float
) -> None:
    """Tokens a second, samples of 1,024 tokens (docs/benchmarks.md, "On a GPU")."""
    work = Workload(rollouts=64, prompt_tokens=64, answer_tokens=960, trains_adapter=is_adapter, recomputes=recomputes, compiles=compiles)
    assert work.tokens / train_s(PUBLISHED[name], work, H100, 1) == pytest.approx(measured, rel=0.125)


def test_the_step_of_the_example_takes_what_it_says() -> None:
    assert train_s(QWEN3_8B, WORK, A100, 4) == pytest.approx(1132, abs=2)
    assert train_s(QWEN3_8B, replace(WORK, has_reference=True), A100, 4) > train_s(QWEN3_8B, WORK, A100, 4)
    assert train_s(QWEN3_8B, replace(WORK, dtype="float32"), A100, 4) > train_s(QWEN3_8B, WORK, A100, 4)


def test_the_paper_s_steps_are_met_within_a_third_and_its_workers_within_a_quarter() -> None:
    """ECHO-2, §5.2 and table 2: 1631 s a step on 4 A100; nine RTX 5090 of 0.274 rollouts/s, as inferred."""
    assert train_s(QWEN3_8B, WORK, A100, 4) == pytest.approx(1631, rel=0.33)
    assert rollouts_per_s(QWEN3_8B, WORK, RTX_5090, WORKER) == pytest.approx(0.274, rel=0.25)
    assert worker_memory(QWEN3_8B, WORKER).cache_room(RTX_5090.memory, 0.9) / 1e9 == pytest.approx(9.4, abs=0.05)


def test_what_does_not_fit_generates_nothing() -> None:
    assert rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, RTX_5090, WORKER) == 0
    assert rollouts_per_s(QWEN3_8B, WORK, RTX_5090, replace(WORKER, length=200_000)) == 0
    two = rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, A100, replace(WORKER, gpus=2))
    assert two > rollouts_per_s(PUBLISHED["Qwen3-32B"], WORK, A100, WORKER) > 0


def test_bytes_of_the_example() -> None:
    found = bytes_per_step(STEP)
    assert found["trajectories"] / 1e6 == pytest.approx(106.3, abs=0.1)
    assert found["weights.chunks"] == 8.2e9
    assert bytes_per_step(replace(STEP, through_log=False))["weights.chunks"] == 0


def test_retention_bounds_what_lies_on_disk() -> None:
    traffic = {"a": 100.0, "b": 100.0, "c": 100.0}
    kept = {"a": Retention(hours=1, bytes=None), "b": Retention(hours=None, bytes=250), "c": Retention(hours=1, bytes=1, is_compacted=True)}
    assert kept_bytes(traffic, kept, step_s=360, steps=1000) == {"a": 1000.0, "b": 250.0, "c": 100.0}
    assert kept_bytes(traffic, kept, step_s=360, steps=2) == {"a": 200.0, "b": 200.0, "c": 100.0}


def test_a_sequential_step_is_rented_where_it_costs_the_least() -> None:
    """The example of `cheapest`: (8 + n) · (800 / n + 100) / 3600 is smallest at n = 8: 16 · 200 / 3600 = 0.889. A pool as fast as training
    (800 / n = 100 s too, here by chance) is not the rule: with T_train + T_bcast = 25 s it would be 32 workers, and 16 are cheapest."""
    run = SequentialRun(fixed_s=100, learner_per_hour=8, worker_per_hour=1)
    best = run.cheapest(64, lambda workers: 800 / workers)
    assert (best.workers, best.step_s, best.per_hour) == (8, 200, 16)
    assert best.price == pytest.approx(16 * 200 / 3600)
    # (8 + 16) · (50 + 25) = 1800; 15: 23 · 78.33 = 1801.7; 17: 25 · 72.06 = 1801.5; 32: 40 · 50 = 2000.
    assert replace(run, fixed_s=25).cheapest(64, lambda workers: 800 / workers).workers == 16
    assert run.cheapest(4, lambda workers: 800 / workers).workers == 4, "no more than the groups of a step"
    assert run.cheapest(64, lambda workers: 800.0).workers == 1, "workers that shorten nothing are not rented"


def test_twice_the_workers_are_not_twice_as_fast() -> None:
    """Qwen3-30B-A3B on two A100: weights 30.53 GB and 163.6 MB a sequence of 3328 tokens on each, 0.6 · 2.039e12 B/s.
    64 at once: 41.00 GB / 1.2234e12 = 33.52 ms a token, 6144 tokens 205.9 s; 32: 35.77 GB, 29.24 ms, 179.6 s; 256: 4 · 205.9 s."""
    shape, load = PUBLISHED["Qwen3-30B-A3B"], WorkerLoad(dtype="bfloat16", adapter_rank=0, sequences=64, length=16_384, gpus=2)
    work = Workload(rollouts=256, prompt_tokens=256, answer_tokens=6144, recomputes=True)
    found = [generation_s(shape, work, A100, load, groups=16, workers=workers) for workers in (1, 3, 4, 8)]
    # Three workers: 16 groups cannot be divided, so one has 6 of them, 96 samples: 1.5 · 205.9 s.
    assert found == pytest.approx([823.6, 308.9, 205.9, 179.6], abs=0.5)
    assert generation_s(PUBLISHED["Qwen3-32B"], WORK, RTX_5090, WORKER, groups=128, workers=9) == float("inf")


def test_one_gpu_holds_both_where_the_worker_leaves_room() -> None:
    """Qwen2.5-0.5B with an adapter, 5.2 GB for the learner and 4.1 GB for the worker. Of 24 GB the worker has 0.3 · 24 = 7.2, which leaves
    16.8; at 0.9 it leaves 2.4; at 0.1 it has 2.4 itself."""
    shape = PUBLISHED["Qwen2.5-0.5B"]
    load = replace(RANK, adapter_rank=32, ranks=1, stage=0, tokens=8192)
    learner, worker = learner_memory(shape, load), worker_memory(shape, replace(WORKER, adapter_rank=32, length=1024))
    assert [learner.total / 1e9, worker.least / 1e9] == pytest.approx([5.2, 4.1], abs=0.1)
    assert [holds_both(learner, worker, 24e9, share) for share in (0.1, 0.3, 0.9)] == [False, True, False]


def test_a_checkpoint_has_master_weights_and_moments() -> None:
    """By the weight, in bfloat16: master 4 + moments 8, the workers' file 2, and under ZeRO-0 to 2 the weights again, 2. In float32:
    moments 8 and the file 4; weights 4 under ZeRO-0, weights 4 and master 4 under 1 and 2, master 4 under 3."""
    assert [checkpoint_bytes(100, "bfloat16", stage).total for stage in range(4)] == [1600, 1600, 1600, 1400]
    assert [checkpoint_bytes(100, "float32", stage).total for stage in range(4)] == [1600, 2000, 2000, 1600]
    eight = checkpoint_bytes(QWEN3_8B.parameters, "bfloat16", 3)
    assert eight.total / 1e9 == pytest.approx(114.7, abs=0.05)
    assert eight.total == 7 * eight.snapshot


def test_checkpoints_that_lie_on_the_disk_at_once() -> None:
    """100 weights in bfloat16 under ZeRO-3: trainer 1200, file 200 bytes. Published every step: 3 kept and the new one, 4 · 1400 = 5600.
    Every second: 5 with the two until the publication, of which 3 are published: 5 · 1200 + 3 · 200 = 6600; a store there with 3 and the
    next one: 4 · 200 more. keep = 5, every second: 5 + 2 = 7. Checkpoints and publications every second step: as every step."""
    one = checkpoint_bytes(100, "bfloat16", 3)
    assert disk_need(one, keep=3, every=1, period=1, steps=0).total == 5600
    assert disk_need(one, keep=3, every=1, period=2, steps=0).total == 6600
    assert disk_need(one, keep=3, every=1, period=2, steps=0, stored=3).total == 7400
    assert disk_need(one, keep=5, every=1, period=2, steps=0).checkpoints == 7
    assert disk_need(one, keep=3, every=2, period=2, steps=0).total == 5600
    # Versions 0, 1 and 2, of which 0 and 2 are published: 3 · 1200 + 2 · 200, and both files in the store.
    assert disk_need(one, keep=3, every=1, period=2, steps=2, stored=3).total == 3 * 1200 + 4 * 200


def test_a_run_that_goes_on_needs_room_for_less() -> None:
    """5600 bytes in all, 1400 each: three there leave 1400; with all four there still one more is written first."""
    need = disk_need(checkpoint_bytes(100, "bfloat16", 3), keep=3, every=1, period=1, steps=0)
    assert [need.room_needed(there) for there in (0, 1400, 4200, 5600, 10_000)] == [5600, 4200, 1400, 1400, 1400]


@pytest.mark.parametrize(("keep", "every", "period"), [(2, 1, 1), (3, 1, 1), (3, 1, 2), (2, 1, 4), (9, 1, 2), (3, 2, 6), (5, 3, 3)])
def test_the_count_is_what_removing_at_publications_leaves(keep: int, every: int, period: int) -> None:
    """Played through as `CheckpointStore.prune` removes: below the publication before, all but the newest `keep`."""
    there: list[int] = []
    before, most = None, (0, 0)
    for version in range(0, 200, every):
        there.append(version)
        most = max(most, (len(there), sum(found % period == 0 for found in there)))
        if version % period == 0:
            if before is not None:
                there = [found for found in there if found in there[-keep:] or found >= before]
            before = version
    need = disk_need(checkpoint_bytes(100, "bfloat16", 3), keep=keep, every=every, period=period, steps=0)
    assert (need.checkpoints, need.published) == most


def test_a_rank_that_is_too_large_is_changed_as_little_as_possible() -> None:
    """The example of `least_change`, and both orders: recomputation before ranks, ranks without recomputation before ranks with it."""
    adapter = replace(RANK, adapter_rank=32, ranks=1, stage=0, recomputes=False)
    assert least_change(QWEN3_8B, adapter, 80e9) == replace(adapter, recomputes=True)
    whole = replace(RANK, tokens=4096, ranks=1, stage=0, recomputes=False)
    seven = PUBLISHED["Qwen2.5-7B"]
    assert least_change(seven, whole, 70e9) == replace(whole, ranks=4, stage=3)
    assert least_change(seven, whole, 80e9) == replace(whole, ranks=2, stage=3, recomputes=True)
    # Four ranks without ZeRO share nothing: only the stage is missing, not more ranks.
    assert least_change(seven, replace(whole, ranks=4), 70e9) == replace(whole, ranks=4, stage=3)
    assert least_change(seven, replace(whole, tokens=1_000_000), 80e9) is None


def test_what_makes_weights_arrive_in_time_is_the_least_that_does() -> None:
    """T_train 963 s. 8.04 GB at 10 Mbit/s take 6432 s and 4 s to load: 6.7 steps, so kappa = 7 and S = 7 + 7 - 1."""
    demand = Demand(train_s=963, broadcast_s=6436, rollouts=2048)
    assert arrival_limit_s(demand, 2, 3) == 2 * 963
    assert least_period_and_budget(demand, 2, 1) == (7, 13)
    assert math.isfinite(needed_rate(demand, 7, 13))
    assert math.isinf(needed_rate(demand, 6, 13))
    assert math.isinf(needed_rate(demand, 7, 12))
    assert least_period_and_budget(demand, 2, 2) == (8, 14), "a checkpoint every second step"
    # 1000 s are more than one step and less than two: kappa = 4 of the file stays, and S - 4 + 1 has to be 2.
    assert least_period_and_budget(replace(demand, broadcast_s=1000), 4, 1) == (4, 5)
    mbit_s = least_mbit_s(8.04e9, 4, 2 * 963)
    assert mbit_s == pytest.approx(33.5, abs=0.05)
    assert 8.04e9 * 8 / (mbit_s * 1e6) + 4 == pytest.approx(2 * 963)
    assert math.isinf(least_mbit_s(8.04e9, 4, 3)), "loading alone takes longer"


def test_amounts_are_printed_without_exponents() -> None:
    found = [figure(value) for value in (0, 0.00001234, 0.0481, 12.44, 999.4, 999.6, 1031.2, 116_000)]
    assert found == ["0", "0.0000123", "0.0481", "12.4", "999", "1,000", "1,031", "116,000"]
    assert [seconds(value) for value in (0, 0.00001, 0.0042, 0.26, 1131.1)] == ["0.0 s", "less than 0.1 ms", "4.2 ms", "0.3 s", "1,131.1 s"]
    assert [whole_seconds(value) for value in (0.0042, 7.34, 1131.1)] == ["4.2 ms", "7.3 s", "1,131 s"]
    assert [money(value) for value in (0.0000019, 0.00071, 0.016, 15.344)] == ["less than $0.0001", "$0.00071", "$0.016", "$15.34"]
    assert [size(value) for value in (0, 2000, 40.4e6, 606.1e9, 2e12)] == ["0.0 kB", "2.0 kB", "40.4 MB", "606.1 GB", "2.0 TB"]
