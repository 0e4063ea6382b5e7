"""The process in which trainers run: its imports are paid once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks.process import ForkingProcess
from tests.installed import missing


@pytest.fixture(scope="session")
def torch_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingProcess]:
    """Where jobs run."""
    if absent := missing("torch", "deepspeed", "peft", "transformers"):
        pytest.skip(f"{', '.join(absent)} is not installed: install the extra 'learner'")
    process = ForkingProcess("tests.integration.learner.jobs", tmp_path_factory.mktemp("torch"))
    yield process
    process.close()


@pytest.fixture(scope="session")
def base(torch_process: ForkingProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers, with the head tied to the embeddings."""
    folder = tmp_path_factory.mktemp("base") / "model"
    torch_process.run("make_base_model", folder=str(folder))
    return folder
