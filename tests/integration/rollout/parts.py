"""What a worker's process is given instead of a model: an engine that takes its time, and a base folder with a tokenizer of characters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from echo_rollout.engines.engine import EngineConfig, Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import Sampling

VOCABULARY = 32
_CHARACTERS = "0123456789>"


class PacedEngine(ScriptedEngine):
    """One group takes `seconds` of [rollout.options]; while the file `held` is there, none ends."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._seconds = float(str(config.options.get("seconds", 0.0)))
        self._held = Path(str(config.options["held"])) if "held" in config.options else None

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """By the script, later."""
        await asyncio.sleep(self._seconds)
        while self._held is not None and self._held.exists():
            await asyncio.sleep(0.1)
        return await super().generate(prompt, n, sampling)


def write_base(folder: Path) -> Path:
    """A model folder without weights: all that worker and feeder read of one is its vocabulary and its tokenizer."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}), encoding="utf-8")
    tokenizer = Tokenizer(WordLevel({"?": 1, **{letter: number + 2 for number, letter in enumerate(_CHARACTERS)}}, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class PoisonedEngine(PacedEngine):
    """A prompt that begins with token `poison` of [rollout.options] ends the process as a crash of native code does."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._poison = int(str(config.options["poison"]))

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """By the script, or never."""
        if prompt[0] == self._poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(prompt, n, sampling)
