"""The demo's base model: the same bytes whoever makes it, made once, and able to read and write its task. Runs torch in processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from echo_bus.clock import Deadline
from echo_schemas.errors import UserError
from echo_tasks import base_models
from echo_tasks.base_models import RECIPE, resolve_base
from echo_tasks.catalogue import load_task
from echo_tasks.digits import ReverseDigits
from echo_tasks.practice import KNIGHTS_KNAVES_OPTIONS, SOKOBAN_OPTIONS
from tests.thorough import IS_THOROUGH, only_thorough

# Long enough for two makers on a busy machine.
MAKING_S = 500.0


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the model: the user's, or, in a thorough run, one in which two processes asked for it at once."""
    pytest.importorskip("transformers", reason="the base model is made with torch and transformers: install the extra 'learner'")
    if not IS_THOROUGH:
        return resolve_base("demo:tiny-qwen3").parents[1]
    cache = tmp_path_factory.mktemp("cache")
    call = f"print(resolve_base('demo:tiny-qwen3', Path({str(cache)!r})))"
    code = f"from pathlib import Path; from echo_tasks.base_models import resolve_base; {call}"
    with ThreadPoolExecutor(2) as pool:
        runs = list(
            pool.map(
                lambda _: subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=MAKING_S),
                range(2),
            )
        )
    assert {run.stdout.strip() for run in runs} == {str(cache / "models" / f"tiny-qwen3-{RECIPE}")}
    return cache


@pytest.mark.slow
def test_a_model_that_is_there_is_not_made_again(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("the model was made again")

    monkeypatch.setattr(base_models, "_make", refuse)
    assert resolve_base("demo:tiny-qwen3", made) == made / "models" / f"tiny-qwen3-{RECIPE}"


@pytest.mark.slow
@only_thorough
def test_nothing_but_the_model_and_its_lock_stays_in_the_cache(made: Path) -> None:
    assert sorted(path.name for path in (made / "models").iterdir()) == [f".tiny-qwen3-{RECIPE}.lock", f"tiny-qwen3-{RECIPE}"]


@pytest.mark.slow
def test_the_tokenizer_reads_back_what_it_wrote(made: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_base("demo:tiny-qwen3", made))
    for seq in range(20):
        prompt = ReverseDigits().prompt(0, seq)
        text = prompt.text + str(prompt.entry["answer"])
        ids = tokenizer.encode(text)
        assert len(ids) == len(text), "one token a character, and none in front of it"
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id == json.loads((resolve_base("demo:tiny-qwen3", made) / "config.json").read_text())["eos_token_id"]


@pytest.mark.slow
def test_the_model_is_right_sometimes_and_wrong_mostly(made: Path) -> None:
    """What reinforcement learning needs: neither 0 nor 1 of the greedy answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_base("demo:tiny-qwen3", made)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = [ReverseDigits().prompt(3, seq) for seq in range(200)]
    ids = torch.tensor([tokenizer.encode(prompt.text) for prompt in prompts])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(6):
            probabilities = model(input_ids=ids).logits[:, -1].softmax(dim=-1)
            ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    right = sum(tokenizer.decode(row[7:]) == prompt.entry["answer"] for row, prompt in zip(ids, prompts, strict=True))
    assert 0.08 < right / len(prompts) < 0.45


@pytest.mark.slow
@pytest.mark.parametrize("demo", ["knights-knaves", pytest.param("sokoban", marks=only_thorough)])
def test_the_tasks_models_read_their_prompts_and_are_right_sometimes(demo: str) -> None:
    """First answers alone, sampled one by one: the share that earns something. The models are the demos', from the user's cache."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("reasoning_gym", reason="the puzzles are reasoning-gym's: install the extra 'tasks'")
    options = dict(SOKOBAN_OPTIONS if demo == "sokoban" else KNIGHTS_KNAVES_OPTIONS)
    folder, task = resolve_base(f"demo:tiny-qwen3-{demo}"), load_task(demo, options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    right = 0.0
    for seq in range(100):
        prompt = task.prompt(3, seq)
        ids = tokenizer.encode(prompt.text, return_tensors="pt")
        assert tokenizer.decode(ids[0]) == prompt.text
        with torch.no_grad():
            said = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=12, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :]
        answer = str(tokenizer.decode(said, skip_special_tokens=True))
        episode = task.environment(prompt.entry)
        roles = "".join(name + role for name, role in prompt.entry.get("roles", {}).items())
        right += float(answer == roles) if episode is None else episode.step(answer).reward
    assert 0.1 < right / 100 < 0.65


@pytest.mark.slow
@only_thorough
def test_two_who_ask_at_once_get_one_model_and_it_is_the_same_to_the_byte_as_the_one_in_the_users_cache(made: Path) -> None:
    found = checksums(resolve_base("demo:tiny-qwen3", made))
    assert found == checksums(resolve_base("demo:tiny-qwen3"))
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(found)


def test_who_asks_second_waits_for_the_lock_and_finds_the_model_made(tmp_path: Path) -> None:
    folder = tmp_path / "models" / f"tiny-qwen3-{RECIPE}"
    folder.parent.mkdir(parents=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        asked = pool.submit(resolve_base, "demo:tiny-qwen3", tmp_path)
        deadline = Deadline.after(60)
        while not _somebody_waits_for(lock.fileno()):
            assert not deadline.expired(), "waited for the second to ask for the lock"
            assert not asked.done(), "the second did not wait"
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert asked.result(60) == folder


def _somebody_waits_for(descriptor: int) -> bool:
    """Whether the kernel lists a blocked lock on this file: lines with `->`."""
    inode = f":{os.fstat(descriptor).st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())


@pytest.mark.slow
def test_making_that_fails_leaves_nothing_behind_and_says_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base_models.DEMO_MODELS, "demo:tiny-qwen3", "no-such-practice")
    with pytest.raises(UserError, match=r"could not be made: KeyError: 'no-such-practice'.*make setup"):
        resolve_base("demo:tiny-qwen3", tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".tiny-qwen3-{RECIPE}.lock"]


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / f"tiny-qwen3-{RECIPE}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("ECHO_CACHE_FOLDER", str(tmp_path))
    assert resolve_base("demo:tiny-qwen3") == folder


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert resolve_base(str(tmp_path)) == tmp_path


def test_a_base_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no demo model 'demo:tiny-qwen'.*Did you mean 'demo:tiny-qwen3'"):
        resolve_base("demo:tiny-qwen", tmp_path)
    with pytest.raises(UserError, match=r"no base model folder /no/such/folder.*\[policy\] base"):
        resolve_base("/no/such/folder")
    with pytest.raises(UserError, match=r"is no model folder: it has no config.json"):
        resolve_base(str(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be kept in .*/file/models: Not a directory.*ECHO_CACHE_FOLDER"):
        resolve_base("demo:tiny-qwen3", tmp_path / "file")


def test_what_somebody_deleted_in_part_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = tmp_path / "models" / f"tiny-qwen3-{RECIPE}" / "model.safetensors"
    leftover.parent.mkdir(parents=True)
    leftover.touch()

    def make(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "config.json").write_text("{}", encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", make)
    assert [path.name for path in resolve_base("demo:tiny-qwen3", tmp_path).iterdir()] == ["config.json"]
