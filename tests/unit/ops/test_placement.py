"""Who gets which cores and devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo_ops.roles import Role
from echo_ops.supervisor.placement import Machine, ProcessPlacement, WorkerNeed, placement, this_machine
from echo_ops.supervisor.plan import plan_children
from echo_settings import Settings
from echo_settings.learner import LearnerSettings
from echo_settings.offline import OfflineSettings
from echo_settings.pool import CoordinatorSettings, DeviceSettings, PoolSettings
from echo_settings.sections import RolloutSettings, RunSettings, ScoringSettings


def bound_cores(place: ProcessPlacement) -> list[int]:
    return [int(core) for core in place.environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")]


def test_on_two_cores_the_worker_has_the_first_and_the_learner_the_second() -> None:
    found = placement(Machine((0, 1)), [WorkerNeed()])
    assert found.workers[0].environ["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert found.workers[0].cores == ()  # only its compute threads are bound
    assert found.learner.cores == (1,)
    assert found.others.cores == ()
    assert {place.environ["OMP_NUM_THREADS"] for place in (*found.workers, found.learner, found.others)} == {"1"}
    assert found.learner.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(("num_cores", "lists", "threads"), [(2, "0|0", 1), (9, "0,1|2,3", 2), (7, "0|1", 1)])
def test_each_process_that_a_model_is_split_over_has_its_list_of_cores(num_cores: int, lists: str, threads: int) -> None:
    """vLLM refuses to start with fewer lists than processes."""
    found = placement(Machine(tuple(range(num_cores))), [WorkerNeed(gpus=2)])
    assert found.workers[0].environ["VLLM_CPU_OMP_THREADS_BIND"] == lists
    assert found.workers[0].environ["OMP_NUM_THREADS"] == str(threads)


def test_processes_that_compute_on_cores_keep_their_memory_and_the_others_do_not() -> None:
    for cores, workers in (((0, 1), 1), ((0, 1), 2), (tuple(range(16)), 3)):
        found = placement(Machine(cores), [WorkerNeed()] * workers)
        assert all("MALLOC_TRIM_THRESHOLD_" in place.environ for place in (*found.workers, found.learner))
        assert "MALLOC_TRIM_THRESHOLD_" not in found.others.environ


def test_cores_are_those_that_the_container_lends() -> None:
    found = placement(Machine((5, 9)), [WorkerNeed()])
    assert (bound_cores(found.workers[0]), found.learner.cores) == ([5], (9,))


@pytest.mark.parametrize("num_cores", [2, 3, 4, 8, 13])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_nobody_shares_a_core_and_threads_match_cores(num_cores: int, workers: int) -> None:
    found = placement(Machine(tuple(range(num_cores))), [WorkerNeed()] * workers)
    if "VLLM_CPU_OMP_THREADS_BIND" not in found.workers[0].environ:
        assert num_cores - (num_cores >= 4) < workers + 1
        return
    taken = [core for place in found.workers for core in bound_cores(place)] + list(found.learner.cores)
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(range(num_cores))
    for place in found.workers:
        assert int(place.environ["OMP_NUM_THREADS"]) == len(bound_cores(place)) >= 1
    assert int(found.learner.environ["OMP_NUM_THREADS"]) == len(found.learner.cores) >= 1


def test_too_few_cores_pin_nobody() -> None:
    for machine, workers in ((Machine((0,)), 1), (Machine((0, 1)), 2), (Machine((0, 1)), 0)):
        found = placement(machine, [WorkerNeed()] * workers)
        assert len(found.workers) == workers
        assert found.learner.cores == ()
        assert all("VLLM_CPU_OMP_THREADS_BIND" not in place.environ for place in found.workers)


def test_nobody_is_bound_where_other_work_shares_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert not this_machine().binds
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    assert this_machine().binds
    bound = placement(Machine(tuple(range(8))), [WorkerNeed()] * 2)
    found = placement(Machine(tuple(range(8)), binds=False), [WorkerNeed()] * 2)
    assert found.learner == replace(bound.learner, cores=())
    for shared, own in zip(found.workers, bound.workers, strict=True):
        assert shared.cores == ()
        assert {**own.environ} == {**shared.environ, "VLLM_CPU_OMP_THREADS_BIND": own.environ["VLLM_CPU_OMP_THREADS_BIND"]}


def test_gpus_go_to_the_learners_ranks_first_and_then_to_each_worker() -> None:
    found = placement(Machine((0, 1), ("0", "1", "2", "3")), [WorkerNeed()] * 2, ranks=2)
    assert found.learner.environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert [place.environ["CUDA_VISIBLE_DEVICES"] for place in found.workers] == ["2", "3"]
    assert found.others.environ["CUDA_VISIBLE_DEVICES"] == ""
    wide = placement(Machine((0,), ("0", "1", "2")), [WorkerNeed(gpus=2)])
    assert wide.workers[0].environ["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_too_few_gpus_are_shared_by_all() -> None:
    found = placement(Machine((0, 1), ("0",)), [WorkerNeed()])
    assert found.workers == (ProcessPlacement(),)
    assert found.learner == ProcessPlacement()


def test_a_run_has_its_processes_in_the_order_of_their_start_up_times(tmp_path: Path) -> None:
    settings = Settings(rollout=RolloutSettings(workers=2), scoring=ScoringSettings(workers=2))
    plans = plan_children(settings, Machine((0, 1, 2)), config=Path("run.toml"), overrides={"ECHO_RUN__SEED": "3"}, folder=tmp_path)
    assert [plan.name for plan in plans] == ["worker-0", "worker-1", "learner", "reward-0", "reward-1", "feeder"]
    worker = plans[1]
    assert worker.command[1:] == (
        *("-m", "echo_ops.cli", "run", "worker", "--announce", str(tmp_path / "processes" / "worker-1.json")),
        *("--name", "worker-1", "--config", "run.toml"),
    )
    assert worker.log == tmp_path / "logs" / "worker-1.log"
    assert all(plan.environ["ECHO_RUN__SEED"] == "3" for plan in plans)
    assert [plan.cores for plan in plans if plan.role is Role.LEARNER] == [(2,)]


def test_a_pool_of_several_has_a_coordinator_if_the_file_has_one(tmp_path: Path) -> None:
    def roles(settings: Settings) -> set[Role]:
        return {plan.role for plan in plan_children(settings, Machine((0,)), config=None, overrides={}, folder=tmp_path)}

    section = CoordinatorSettings(enabled=True)
    here, elsewhere = PoolSettings(name="here", workers=1), PoolSettings(name="elsewhere", workers=0)
    assert Role.COORDINATOR in roles(Settings(rollout=RolloutSettings(workers=2), coordinator=section))
    assert Role.COORDINATOR in roles(Settings(rollout=RolloutSettings(pool=(here, elsewhere)), coordinator=section))
    assert Role.COORDINATOR not in roles(Settings(rollout=RolloutSettings(workers=2)))
    assert Role.COORDINATOR not in roles(Settings(rollout=RolloutSettings(workers=1), coordinator=section))


def test_a_sequential_run_has_no_feeder(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(mode="sequential"), learner=LearnerSettings())
    plans = plan_children(settings, Machine((0,)), config=None, overrides={}, folder=tmp_path)
    assert Role.FEEDER not in {plan.role for plan in plans}


def test_logged_episodes_come_in_place_of_a_feeder(tmp_path: Path) -> None:
    settings = Settings(offline=OfflineSettings(episodes="hands.jsonl"), rollout=RolloutSettings(workers=0))
    plans = plan_children(settings, Machine((0,)), config=None, overrides={}, folder=tmp_path)
    assert [plan.name for plan in plans] == ["learner", "reward-0", "offline"]


def test_a_worker_whose_engine_is_elsewhere_takes_no_core_and_no_gpu() -> None:
    here, there = WorkerNeed(), WorkerNeed(is_elsewhere=True)
    found = placement(Machine((0, 1)), [there, here])
    assert found.workers[0] == found.others
    assert bound_cores(found.workers[1]) == [0]
    found = placement(Machine((0, 1), ("0", "1")), [there, here])
    assert [place.environ["CUDA_VISIBLE_DEVICES"] for place in found.workers] == ["", "1"]


def test_workers_of_several_kinds_get_each_what_it_needs() -> None:
    found = placement(Machine((0, 1), tuple("01234")), [WorkerNeed(gpus=2), WorkerNeed(gpus=0), WorkerNeed()])
    assert found.learner.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert [place.environ["CUDA_VISIBLE_DEVICES"] for place in found.workers] == ["1,2", "", "3"]


def test_each_kind_of_a_pool_has_its_own_processes(tmp_path: Path) -> None:
    pool = (
        PoolSettings(name="server", workers=2, options={"tensor_parallel_size": 2}),
        PoolSettings(name="split", devices=(DeviceSettings(memory_gb=24, tflops=165), DeviceSettings(memory_gb=8, tflops=30))),
        PoolSettings(name="laptop", engine="transformers", options={"device": "cpu"}),
        PoolSettings(name="elsewhere", workers=0),
    )
    machine = Machine((0, 1), tuple("0123456"))
    plans = plan_children(Settings(rollout=RolloutSettings(pool=pool)), machine, config=None, overrides={}, folder=tmp_path)
    workers = [plan for plan in plans if plan.role is Role.WORKER]
    assert [plan.name for plan in workers] == ["worker-server-0", "worker-server-1", "worker-split-0", "worker-laptop-0"]
    assert [plan.command[-4:] for plan in workers] == [("--name", plan.name, "--kind", plan.name.split("-")[1]) for plan in workers]
    assert [plan.environ["CUDA_VISIBLE_DEVICES"] for plan in workers] == ["1,2", "3,4", "5,6", ""]


def test_flags_of_the_learner_reach_it_and_nobody_else(tmp_path: Path) -> None:
    plans = plan_children(Settings(), Machine((0,)), config=None, overrides={}, folder=tmp_path, learner_flags=["--takeover", "--skip"])
    assert {plan.role for plan in plans if "--skip" in plan.command} == {Role.LEARNER}
    (learner,) = (plan for plan in plans if plan.role is Role.LEARNER)
    assert learner.command[-2:] == ("--takeover", "--skip")
