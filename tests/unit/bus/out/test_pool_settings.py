"""[[rollout.pool]]: what a kind leaves open is as in [rollout], and what does not fit is said with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_schemas.errors import UserError
from echo_settings import load_settings
from echo_settings.kinds import kinds_of, settings_of_kind

POOL = """
[rollout]
engine = "vllm"
groups_in_flight = 16
price_per_hour = 2.0
options = { max_num_seqs = 64, seed = 1 }

[[rollout.pool]]
name = "server"
workers = 2
options = { seed = 7 }

[[rollout.pool]]
name = "laptop"
engine = "transformers"
price_per_hour = 0.1
groups_in_flight = 2
"""


def write(folder: Path, content: str) -> Path:
    file = folder / "run.toml"
    file.write_text(content, encoding="utf-8")
    return file


def refused(folder: Path, content: str) -> str:
    with pytest.raises(UserError) as raised:
        load_settings(write(folder, content), {})
    return f"{raised.value.message} {raised.value.hint}"


def rollout_of(settings: Any, kind: str) -> tuple[Any, ...]:
    rollout = settings_of_kind(settings, kind).rollout
    return rollout.engine, rollout.workers, rollout.price_per_hour, rollout.groups_in_flight, rollout.options


def test_a_kind_is_rollout_with_what_it_says_itself(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, POOL), {})
    assert rollout_of(settings, "server") == ("vllm", 2, 2.0, 16, {"max_num_seqs": 64, "seed": 7})
    # Another engine is not given arguments that it does not know.
    assert rollout_of(settings, "laptop") == ("transformers", 1, 0.1, 2, {})
    assert settings_of_kind(settings, "") is settings
    assert [name for name, _ in kinds_of(settings)] == ["server", "laptop"]


def test_devices_hold_for_kinds_of_the_same_engine(tmp_path: Path) -> None:
    devices = "devices = [{ memory_gb = 24, tflops = 165 }, { memory_gb = 8, tflops = 30 }]\n"
    kinds = dict(kinds_of(load_settings(write(tmp_path, POOL.replace("[[", devices + "\n[[", 1)), {})))
    assert [device.memory_gb for device in kinds["server"].rollout.devices] == [24, 8]
    assert kinds["laptop"].rollout.devices == ()
    own = dict(kinds_of(load_settings(write(tmp_path, POOL + devices), {})))
    assert len(own["laptop"].rollout.devices) == 2
    assert own["server"].rollout.devices == ()
    assert "memory_gb" in refused(tmp_path, POOL.replace("[[", "devices = [{ memory_gb = 0, tflops = 1 }]\n[[", 1))


def test_a_file_without_a_pool_has_one_kind_without_a_name(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, "[rollout]\nworkers = 3\n"), {})
    ((name, own),) = kinds_of(settings)
    assert (name, own.rollout.workers) == ("", 3)
    with pytest.raises(UserError, match="There is no kind of worker 'laptop'") as raised:
        settings_of_kind(settings, "laptop")
    assert raised.value.hint is not None
    assert "[[rollout.pool]]" in raised.value.hint


def test_an_unknown_kind_is_answered_with_the_nearest(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, POOL), {})
    with pytest.raises(UserError, match="no kind of worker 'labtop'") as raised:
        settings_of_kind(settings, "labtop")
    assert raised.value.hint == "Did you mean 'laptop'?"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[[rollout.pool]]\nname = "a"\npryce_per_hour = 1\n', ("pool a", "'pryce_per_hour'", "Did you mean 'price_per_hour'?")),
        ('[rollout.pool]\nname = "a"\n', ("[[rollout.pool]]",)),
        ('[[rollout.pool]]\nname = "a"\n[[rollout.pool]]\nname = "a"\n', ("the kind 'a' twice",)),
        ('[rollout]\nworkers = 2\n[[rollout.pool]]\nname = "a"\n', ("exclude one another", "in its [[rollout.pool]]")),
        ('[[rollout.pool]]\nname = "two words"\n', ("letters, digits",)),
        ("[[rollout.pool]]\nworkers = 1\n", ("name", "required")),
        ('[[rollout.pool]]\nname = "a"\nworkers = -1\n', ("greater than or equal to 0",)),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(tmp_path: Path, content: str, words: tuple[str, ...]) -> None:
    message = refused(tmp_path, content)
    for word in words:
        assert word in message, message


def test_the_environment_describes_a_pool_as_json(tmp_path: Path) -> None:
    environ = {"ECHO_ROLLOUT__POOL": '[{"name": "a", "workers": 4}]'}
    assert [kind.workers for kind in load_settings(write(tmp_path, ""), environ).rollout.pool] == [4]


def test_the_example_has_three_kinds_at_three_prices() -> None:
    settings = load_settings(Path(__file__).parents[4] / "examples" / "pool.toml", {})
    assert [(name, kind.rollout.price_per_hour) for name, kind in kinds_of(settings)] == [("server", 2.0), ("spot", 0.5), ("laptop", 0.1)]
    assert settings.coordinator.enabled


def test_a_kind_has_its_own_price_file_and_its_own_time_to_drain(tmp_path: Path) -> None:
    content = (
        '[rollout]\nprice_file = "all"\n[[rollout.pool]]\nname = "a"\n[[rollout.pool]]\nname = "b"\nprice_file = "b"\ndrain_s = 25\n'
        '[[rollout.pool]]\nname = "c"\nprice_per_hour = 1.0\n'
    )
    kinds = dict(kinds_of(load_settings(write(tmp_path, content), {})))
    assert [kinds[name].rollout.price_file for name in "abc"] == ["all", "b", ""]
    assert [kinds[name].run.drain_s for name in "abc"] == [2.5, 25.0, 2.5]
