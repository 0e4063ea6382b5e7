"""Builds the request of a seq from its prompt, for feeder and learner, which allocate seqs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from echo_schemas.columns import pack_tokens
from echo_schemas.records import Purpose, RolloutRequest, Sampling, group_id_of
from echo_tasks.prompts import TextCodec
from echo_tasks.task import Prompt, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBuilder:
    """Builds the requests of one run: a pure function of task, seed and seq."""

    run_id: str
    task: Task
    seed: int
    prompts: TextCodec

    def build(self, seq: int, purpose: Purpose, *, group_size: int, sampling: Sampling) -> RolloutRequest:
        """The request of `seq`; its sender sets versions and times (`dataclasses.replace`)."""
        return self.build_of(self.task.prompt(self.seed, seq), seq, purpose, group_size=group_size, sampling=sampling)

    def build_of(self, prompt: Prompt, seq: int, purpose: Purpose, *, group_size: int, sampling: Sampling) -> RolloutRequest:
        """As `build`, for an existing prompt."""
        return RolloutRequest(
            run_id=self.run_id,
            group_id=group_id_of(self.run_id, seq, purpose),
            seq=seq,
            purpose=purpose,
            task=self.task.name,
            messages=prompt.messages,
            prompt_token_ids=pack_tokens(self.prompts.encode(prompt.text)) if prompt.text else b"",
            entry=entry_of(prompt),
            group_size=group_size,
            sampling=sampling,
            required_version=0,
            learner_version=0,
            issued_ms=0,
        )


def entry_of(prompt: Prompt) -> str:
    """The prompt's entry as JSON."""
    return json.dumps(dict(prompt.entry), ensure_ascii=False)
