"""The page on engines, docs/engines.md: its own engine keeps the contract, and its settings are settings."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import EngineConfig, Snapshot, SnapshotRef
from echo_rollout.engines.openai_options import OWN_OPTIONS, parse_options
from echo_rollout.engines.parallax_options import NAMES, parse_parallax_options
from echo_schemas.records import WeightKind
from echo_settings import load_settings
from tests.contract.engines import contract

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
EXAMPLES = PAGE.parents[1] / "examples"
BLOCK = re.compile(r"```(python|toml)\n(.*?)```", re.DOTALL)
MAX_LENGTH = 64


def blocks(language: str) -> list[str]:
    """The page's snippets in one language, in order."""
    return [text for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if kind == language]


def test_the_engine_of_the_page_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    Path(code.splitlines()[0].removeprefix("# ")).write_text(code, encoding="utf-8")
    Path("config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": contract.END}), encoding="utf-8")
    file = Path("run.toml")
    (own,) = [text for text in blocks("toml") if "my_engine" in text]
    file.write_text(own, encoding="utf-8")
    config = EngineConfig(
        base=tmp_path, kind=WeightKind.LORA, dtype="float32", max_length=MAX_LENGTH, lora_rank=8, concurrency=64, options={}
    )
    versions = tuple(
        Snapshot(
            ref=SnapshotRef(version=number, sha256=f"sha-{number}"),
            kind=WeightKind.FULL if number == 3 else WeightKind.LORA,
            folder=tmp_path,
        )
        for number in range(4)
    )

    async def run() -> None:
        engine = open_engine(load_settings(file, {}).rollout.engine, config)
        await engine.start()
        case = contract.Case(engine, versions[:3], versions[3:], None, MAX_LENGTH)
        for behaviour in contract.BEHAVIOURS:
            await asyncio.wait_for(behaviour(case), timeout=60)

    asyncio.run(run())


def test_every_snippet_of_the_page_is_settings_that_its_engine_takes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    options = []
    for text in blocks("toml"):
        file.write_text(text, encoding="utf-8")
        rollout = load_settings(file, {}).rollout
        options.append(rollout.options)
        if rollout.engine == "openai":
            parse_options(rollout.options)
        if rollout.engine == "parallax":
            parse_parallax_options(rollout.options)
    assert options[0] == {"gpu_memory_utilization": 0.8}
    assert {"max_num_seqs": 128, "requests": 64} in options


def test_every_option_of_a_server_and_of_a_cluster_stands_on_the_page() -> None:
    tables = [part.partition("\n\n")[0] for part in PAGE.read_text(encoding="utf-8").split("| option | default |")[1:]]
    rows = [[row.split("|")[1] for row in table.splitlines()[2:]] for table in tables]
    assert [set(re.findall(r"`(\w+)`", "\n".join(names))) for names in rows] == [set(OWN_OPTIONS), set(NAMES)]


def test_the_examples_of_split_models_and_clusters_are_settings_that_their_engines_take() -> None:
    split = load_settings(EXAMPLES / "devices.toml", {}).rollout
    assert split.engine == "vllm"
    assert len(split.devices) == 2
    assert parse_parallax_options(load_settings(EXAMPLES / "parallax.toml", {}).rollout.options).peers
