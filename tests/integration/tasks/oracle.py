"""An engine that knows the answers: to each prompt it says what a table says, so that a task's whole road is walked without a model.

The test writes the table, a JSON file, before the worker starts: the prompt's text to the completions of its group, by index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echo_rollout.engines.engine import EngineConfig, EngineError, Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import Sampling
from echo_tasks.prompts import PromptCodec

TABLE_VARIABLE = "ORACLE_TABLE"


class OracleEngine(ScriptedEngine):
    """Completions by the table; everything else as scripted."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._codec = PromptCodec(config.base)
        self._table: dict[str, list[str]] = json.loads(Path(os.environ[TABLE_VARIABLE]).read_text(encoding="utf-8"))

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """The first `n` completions of the prompt."""
        text = self._codec.decode(prompt)
        completions = self._table.get(text)
        ref = self.installed
        if completions is None or ref is None:
            raise EngineError(f"The oracle was not asked this before: {text!r}.")
        made = [self._generation(self._codec.encode(completion).tolist(), ref, sampling) for completion in completions[:n]]
        return [replace(one, text=completion) for one, completion in zip(made, completions, strict=False)]
