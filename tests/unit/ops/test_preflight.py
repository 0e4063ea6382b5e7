"""`echoswarm check`, and what `up` refuses: each mistake in a file is one sentence, and a right file has none."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="prompts are measured in tokens: install the extra 'rollout-cpu' or 'learner'")

from echo_ops.preflight import _trust, examine, refuse_unsound
from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings

ZERO_3 = Path(__file__).parents[3] / "examples" / "deepspeed" / "zero3.json"
PARALLAX = {"url": "http://127.0.0.1:1", "weights": "external"}
TOKENS = {str(digit): digit for digit in range(1, 10)} | {"?": 0, ">": 10}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model's folder, as far as anybody looks before the start: 32 positions, digits for tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 11, "max_position_embeddings": 32}), encoding="utf-8")
    tokenizer = Tokenizer(WordLevel(TOKENS, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


TASK = """
from echo_schemas.records import ChatMessage
from echo_tasks.task import Prompt, SingleTurn

class Plain(SingleTurn):
    name, rewards = "plain", ("exact",)
    def prompt(self, seed, seq):
        return Prompt(text="123456>", entry={"answer": "654321"})

class Wordy(Plain):
    def prompt(self, seed, seq):
        return Prompt(text="Sum 12>", entry={"answer": "3"})

class Chatty(Plain):
    def prompt(self, seed, seq):
        return Prompt(messages=(ChatMessage(role="user", content="123456>"),), entry={"answer": "654321"})

class Broken(Plain):
    def prompt(self, seed, seq):
        raise KeyError("no such file of puzzles")
"""
REWARDS = """
import time
def half(sample): return 0.5
def words(sample): return "good"
def fails(sample): return 1 / 0
def hangs(sample): time.sleep(60)
def forgets(sample): sample.completion
async def waits(sample): return 1.0
"""


@pytest.fixture
def settings(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`settings(section={key: value})`: a run in which everything is right, but for what is given."""
    # Nobody listens at the address of these tests.
    monkeypatch.setattr("echo_ops.preflight._REACH_S", 0.05)
    (tmp_path / "my_task.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    right: dict[str, dict[str, Any]] = {
        "kafka": {"bootstrap": "127.0.0.1:1"},
        "task": {"name": f"{tmp_path}/my_task.py:Plain"},
        "policy": {"base": str(base), "max_length": 32},
        "rollout": {"engine": "transformers", "max_new_tokens": 8},
        "rewards": {"exact": 1.0, f"{tmp_path}/my_rewards.py:half": 1.0, f"{tmp_path}/my_rewards.py:waits": 1.0},
        "checkpoint": {"folder": str(tmp_path / "run")},
    }

    def make(**sections: dict[str, Any]) -> Settings:
        return Settings.model_validate({**right, **{name: {**right.get(name, {}), **given} for name, given in sections.items()}})

    return make


def problems(settings: Settings, *, quickly: bool = False) -> list[str]:
    """What stands in the way, but for the Kafka that these tests do not have."""
    found = [finding.message for finding in examine(settings, quickly=quickly) if not finding.is_note]
    return [message for message in found if "127.0.0.1:1" not in message]


def notes(settings: Settings) -> list[str]:
    return [finding.message for finding in examine(settings) if finding.is_note]


def test_a_right_file_has_nothing_in_its_way_but_a_kafka_that_does_not_answer(settings: Any) -> None:
    found = list(examine(settings()))
    assert [finding.is_note for finding in found] == [False]
    assert "127.0.0.1:1" in found[0].message
    refuse_unsound(settings())


@pytest.mark.parametrize("name", ["reverse", "sort", "sokoban", "knights-knaves"])
def test_the_demos_files_are_right(name: str) -> None:
    with resources.as_file(resources.files("echo_ops.demo").joinpath(f"{name}.toml")) as file:
        assert problems(load_settings(file, {}), quickly=True) == []


@pytest.mark.parametrize(
    ("section", "given", "says"),
    [
        ("task", {"name": "revers-digits"}, "There is no task 'revers-digits'."),
        ("task", {"name": "my_tusk.py:Plain"}, "There is no Python file my_tusk.py."),
        ("task", {"name": "reverse-digits", "options": {"digits": 3}}, "cannot be made with the options ['digits']"),
        ("task", {"name": "{folder}/my_task.py:Broken"}, "cannot make its first prompt: KeyError: 'no such file of puzzles'"),
        ("policy", {"base": "demo:tiny-qwen4"}, "There is no demo model 'demo:tiny-qwen4'."),
        ("policy", {"base": "/nowhere/at/all"}, "There is no base model folder /nowhere/at/all."),
        ("policy", {"max_length": 64}, "[policy] max_length is 64, and the model in {base} has 32 positions."),
        ("learner", {"loss": "grpo"}, "There is no loss 'grpo'."),
        ("learner", {"loss": "grpo_tis", "loss_options": {"clip": 0.2}}, "The loss 'grpo_tis' has no option 'clip'."),
        ("learner", {"loss": "no_such_module:loss"}, "'no_such_module:loss' cannot be imported: there is no module 'no_such_module'."),
        ("learner", {"deepspeed": f"{ZERO_3}", "compile": True}, "[learner] compile does not go with ZeRO-3"),
        ("rollout", {"engine": "parallax", "options": PARALLAX}, "The engine 'parallax' cannot prove which version it serves."),
        (
            "rollout",
            {"engine": "parallax", "options": PARALLAX, "unproved_versions": "allow"},
            "sends prompts as chat messages, and {base} has no chat template.",
        ),
        ("rollout", {"engine": "parallax", "options": {"weights": "external"}}, "[rollout.options] url is missing."),
        ("learner", {"deepspeed": "zero4.json"}, "[learner] deepspeed names zero4.json, which cannot be read"),
        ("rollout", {"engine": "vlm"}, "There is no engine 'vlm'."),
        ("rollout", {"price_file": "spot.price"}, "The price file spot.price cannot be read: No such file or directory."),
        ("rollout", {"price_file": "{folder}/my_task.py"}, "my_task.py holds no number."),
        ("coordinator", {"enabled": True, "machines": "metric"}, "no kind says how many it may start."),
        (
            "rollout",
            {"engine": "transformers", "devices": [{"memory_gb": 8, "tflops": 1}]},
            "The engine 'transformers' does not split a model over [rollout] devices.",
        ),
        ("rollout", {"engine": "json:loads.x"}, "json has no attribute 'loads.x'."),
        ("rewards", {"exakt": 1.0}, "There is no reward 'exakt'."),
        ("rewards", {"{folder}/my_rewards.py:hlaf": 1.0}, "has no attribute 'hlaf'."),
        ("offline", {"episodes": "games.jsonl"}, "[offline] episodes names games.jsonl, and there is no such file."),
        ("checkpoint", {"folder": "{base}/config.json/run"}, "cannot be made or written."),
        ("store", {"uri": "sss://bucket/runs"}, "[store] uri sss://bucket/runs cannot be opened"),
    ],
)
def test_a_mistake_is_one_sentence_and_up_refuses_it(
    settings: Any, tmp_path: Path, base: Path, section: str, given: dict[str, Any], says: str
) -> None:
    def filled(value: Any) -> Any:
        return value.replace("{folder}", str(tmp_path)).replace("{base}", str(base)) if isinstance(value, str) else value

    wrong = settings(**{section: {filled(key): filled(value) for key, value in given.items()}})
    (found,) = problems(wrong)
    assert filled(says) in found
    with pytest.raises(UserError) as caught:
        refuse_unsound(wrong)
    assert filled(says) in caught.value.message


def test_workers_that_pass_weights_on_need_ports_and_with_tls_certificates(settings: Any) -> None:
    weights = {"source": "peers", "secret": "s" * 32, "port": 7400}
    assert problems(settings(weights=weights), quickly=True) == []
    (found,) = problems(settings(weights=weights, rollout={"workers": 2}), quickly=True)
    assert found == "[weights] port = 7400 serves one worker, and 2 are started on this machine."
    tls = {"client": {"security.protocol": "SSL"}}
    (found,) = problems(settings(weights=weights, kafka=tls), quickly=True)
    assert "need a certificate" in found
    assert problems(settings(weights=weights, kafka=tls, rollout={"workers": 0}), quickly=True) == []


def test_mistakes_are_all_told_at_once(settings: Any) -> None:
    wrong = settings(task={"name": "revers-digits"}, learner={"loss": "grpo"}, rollout={"engine": "vlm"})
    assert len(problems(wrong)) == 3


def test_a_prompt_that_leaves_no_room_for_an_answer(settings: Any) -> None:
    (found,) = problems(settings(rollout={"max_new_tokens": 26}))
    assert found == "A prompt of 7 tokens and 26 new ones are above the engine's 32."


def test_a_task_that_is_not_written_in_the_models_tokens(settings: Any, tmp_path: Path) -> None:
    (found,) = problems(settings(task={"name": f"{tmp_path}/my_task.py:Wordy"}))
    assert "has no token for 4 of the 7 pieces of the task's first prompt." in found


def test_a_task_in_chat_form_needs_a_template(settings: Any, tmp_path: Path, base: Path) -> None:
    chatty = settings(task={"name": f"{tmp_path}/my_task.py:Chatty"})
    (found,) = problems(chatty)
    assert problems(chatty, quickly=True) == [found]
    assert found == f"The task asks in chat form, and {base} has no chat template: no prompt can be made of its messages."
    with pytest.raises(UserError, match="Take the model's chat version"):
        refuse_unsound(chatty)
    for name, content in (
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        ("chat_template.jinja", "{{ messages }}"),
    ):
        (base / name).write_text(content, encoding="utf-8")
        assert problems(chatty, quickly=True) == []
        (base / name).unlink()


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("words", "raised BadValue: The value must be a number; it is a str."),
        ("fails", "raised ZeroDivisionError: division by zero"),
        ("forgets", "None (is a `return` missing?)"),
        ("hangs", "did not answer within 0.1 s."),
    ],
)
def test_a_reward_is_called_once(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: str, says: str) -> None:
    monkeypatch.setattr("echo_ops.trial_call._CALL_S", 0.1)
    name = f"{tmp_path}/my_rewards.py:{reward}"
    (found,) = notes(settings(rewards={name: 1.0}))
    assert found.startswith(f"The reward {name!r}, called with a made-up sample, ")
    assert says in found


def test_a_reward_that_needs_a_process_is_called_in_one(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "my_isolated.py").write_text(
        "import threading\n"
        "from echo_tasks.rewards import reward\n"
        "@reward(name='main', isolated=True)\n"
        "def main(sample):\n"
        "    assert threading.current_thread() is threading.main_thread()\n"
        "    return 1.0\n"
        "@reward(name='broken', isolated=True)\n"
        "def broken(sample): return 1 / 0\n",
        encoding="utf-8",
    )
    scoring = {"processes": 1}
    assert notes(settings(rewards={f"{tmp_path}/my_isolated.py:main": 1.0}, scoring=scoring)) == []
    (found,) = notes(settings(rewards={f"{tmp_path}/my_isolated.py:broken": 1.0}, scoring=scoring))
    assert "called with a made-up sample, gave no score: ZeroDivisionError" in found


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"steps": 3, "updates_per_step": 1, "warmup_steps": 3}, "the run of 3 updates: its rate never reaches lr."),
        ({"steps": 3, "lr_schedule": "linear", "decay_steps": 9}, "the run ends after 3 updates: its rate does not fall to its end."),
    ],
)
def test_a_rate_that_the_run_is_too_short_for_is_noted(settings: Any, learner: dict[str, Any], says: str) -> None:
    (found,) = notes(settings(learner=learner))
    assert found.startswith("[learner] ")
    assert says in found


@pytest.mark.parametrize("content", ["[]", '{"zero_optimization": 3}'])
def test_a_file_of_deepspeed_s_without_settings_is_a_sentence(settings: Any, tmp_path: Path, content: str) -> None:
    file = tmp_path / "zero.json"
    file.write_text(content, encoding="utf-8")
    found = [finding.message for finding in examine(settings(learner={"deepspeed": str(file)})) if "deepspeed names" in finding.message]
    assert len(found) == 1
    assert f"{file}, which cannot be read" in found[0]


def test_what_a_disk_has_no_room_for(settings: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that no config.json says: the files of weights are counted."""
    monkeypatch.setattr("echo_ops.preflight.expected_bytes", lambda settings: 1 << 60)
    (found,) = problems(settings(policy={"update": "full"}))
    assert "and the run's checkpoints take" in found
    assert any("to train all weights, and this machine has" in note for note in notes(settings(policy={"update": "full"})))


def test_every_known_model_s_checkpoints_are_counted(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B by its name alone, bfloat16, ZeRO-0, published every second step: 5 checkpoints of 14 bytes a weight without and 16 with the
    workers' file, three of them with it, and 4 files in the store: 8.19e9 · (5 · 14 + 3 · 2 + 4 · 2) = 688.0e9 bytes, 640.8 GiB.
    One takes 8.19e9 · 16 bytes = 131.1 GB. With 500 GiB of checkpoints there, in a file with two names, 140.8 GiB more are needed."""
    run = settings(policy={"base": str(tmp_path / "Qwen3-8B"), "update": "full", "dtype": "bfloat16"})
    for free, is_enough in ((641, True), (640, False)):
        monkeypatch.setattr("echo_ops.preflight.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free << 30))
        found = [message for message in problems(run, quickly=True) if "checkpoints take" in message]
        assert bool(found) is not is_enough
    assert "has 687.2 GB left, and the run's checkpoints take 688.0 GB more: 5 lie there at once, each of 131.1 GB at most." in found[0]

    checkpoint = tmp_path / "run" / "v16-abc" / "trainer"
    checkpoint.mkdir(parents=True)
    with (checkpoint / "states.pt").open("wb") as file:
        file.truncate(500 << 30)
    (tmp_path / "run" / "v17-abc").mkdir()
    (tmp_path / "run" / "v17-abc" / "states.pt").hardlink_to(checkpoint / "states.pt")
    for free, is_enough in ((141, True), (140, False)):
        monkeypatch.setattr("echo_ops.preflight.shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free << 30))
        found = [message for message in problems(run, quickly=True) if "checkpoints take" in message]
        assert bool(found) is not is_enough


def test_a_coordinator_without_prices_is_a_note(settings: Any) -> None:
    pool = [{"name": "free"}, {"name": "paid", "price_per_hour": 1.0}]
    (found,) = (note for note in notes(settings(coordinator={"enabled": True}, rollout={"pool": pool})) if "price" in note)
    assert found.startswith("Without a price free count as free")
    assert not [note for note in notes(settings(rollout={"pool": pool})) if "price" in note]


def write_key(path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_keys_that_are_missing_are_said_before_anything_starts(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="install the extra 'signatures'")
    pool = [{"name": "spot", "workers": 2}]

    def said(rollout: Any = None, **trust: str) -> list[str]:
        settings = Settings.model_validate({"trust": trust, "rollout": rollout or {}})
        return [f"{finding.message} {finding.hint}" for finding in _trust(settings)]

    assert "no key for worker.worker-0" in said(keys=str(tmp_path))[0]
    with pytest.raises(UserError, match="no file of signers"):
        said(signatures="required", signers=str(tmp_path / "none.toml"))
    (tmp_path / "signers.toml").write_text("")
    for name in ("worker.gpu-7.key", "worker.worker-spot-1.key", "reward.key"):
        write_key(tmp_path / name)
    # A key of another worker is of no use to those that `up` starts.
    assert ["keys new worker worker-0" in line for line in said(keys=str(tmp_path))] == [True]
    assert ["keys new worker worker-spot-0" in line for line in said(rollout={"pool": pool}, keys=str(tmp_path))] == [True]
    write_key(tmp_path / "worker.worker-0.key")
    assert said(keys=str(tmp_path), signatures="required", signers=str(tmp_path / "signers.toml")) == []
    (note,) = said(signatures="required", signers=str(tmp_path / "signers.toml"))
    assert "keys names no folder" in note


@pytest.mark.parametrize(
    ("groups", "updates", "split", "is_told"),
    [(16, 4, "groups", True), (16, 4, "samples", False), (64, 4, "groups", False), (4, 1, "groups", False)],
)
def test_few_whole_groups_an_update_are_a_note(settings: Any, groups: int, updates: int, split: str, *, is_told: bool) -> None:
    found = notes(settings(learner={"groups_per_step": groups, "updates_per_step": updates, "split": split}))
    assert any("whole groups" in note for note in found) is is_told


@pytest.mark.parametrize(
    ("admission", "over_budget", "is_told"), [("free", "downweight", True), ("free", "drop", False), ("pace", "downweight", False)]
)
def test_samples_that_may_grow_older_without_end_are_a_note(settings: Any, admission: str, over_budget: str, *, is_told: bool) -> None:
    found = notes(settings(staleness={"admission": admission, "over_budget": over_budget}))
    assert any("grow older" in note for note in found) is is_told
