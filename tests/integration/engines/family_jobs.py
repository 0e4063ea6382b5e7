"""Jobs: how far engine and learner are apart on a tiny random model of a family. Imports torch, and what the engine imports.

python -m tests.integration.engines.family_jobs     # of mixtures of experts, with and without routing replay
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from echo_learner.training.cut import Cut
from echo_learner.training.policy_model import PolicyConfig, PolicyModel, load_policy, snapshot_names
from echo_learner.training.stored_form import StoredForm
from echo_learner.training.weight_file import Slot
from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import EngineConfig, Generation, Snapshot, SnapshotRef
from echo_schemas.records import Sampling, WeightKind
from tests.contract.engines.snapshots import END, VOCABULARY, write_tokenizer
from tests.integration.learner.families import write_family

PROMPT = (5, 9, 12, 7)
SAMPLING = Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01)
# The least width of a head that vLLM's kernels for processors take.
_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 64, "head_dim": 32, "bos_token_id": None, "eos_token_id": END, "pad_token_id": 0}


def engine_difference(engine: str, family: str) -> dict[str, float]:
    """The largest difference of a token's log-probability, and how many tokens were compared."""
    with tempfile.TemporaryDirectory() as folder:
        write_family(family, folder, **_SHAPE)
        write_tokenizer(Path(folder))
        policy = _policy(folder)
        generations = asyncio.run(_generate(engine, Path(folder), _published(policy, Path(folder))))
        differences = []
        for generation in generations:
            ids = torch.tensor([[*PROMPT, *generation.token_ids.tolist()]])
            columns = torch.arange(len(PROMPT), ids.shape[1])
            with torch.no_grad():
                ours, _ = policy(ids, columns * 0, columns, torch.ones(len(columns), dtype=torch.bool))
            differences.append((ours - torch.from_numpy(generation.logprobs)).abs())
    return {"largest": float(torch.cat(differences).max()), "tokens": len(torch.cat(differences))}


def replay_differences(family: str, dtype: str, shifted: float) -> dict[str, float]:
    """The mean difference of a token's log-probability where the learner chooses experts (`own`) and where it replays the engine's
    (`replayed`), and the share of choices that it would make otherwise. `shifted`: added to the learner's routers, times a normal number,
    as if they were of other weights."""
    counts = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts"}
    shape = {**_SHAPE, counts[family]: 16, "num_experts_per_tok": 4, "num_hidden_layers": 4}
    with tempfile.TemporaryDirectory() as folder:
        write_family(family, folder, **shape)
        write_tokenizer(Path(folder))
        policy = _policy(folder, dtype=dtype, replay_experts=True)
        generations = asyncio.run(
            _generate("transformers", Path(folder), _published(policy, Path(folder)), dtype=dtype, notes_experts=True)
        )
        routers = policy.routers
        assert routers is not None
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name.endswith("gate.weight"):
                    parameter.add_(shifted * torch.randn_like(parameter))
        sums = {"own": 0.0, "replayed": 0.0, "otherwise": 0.0}
        for generation in generations:
            assert generation.experts is not None
            ids = torch.tensor([[*PROMPT, *generation.token_ids.tolist()]])
            columns = torch.arange(len(PROMPT), ids.shape[1])
            given = torch.full((1, ids.shape[1], routers.shape[0] * routers.shape[1]), -1)
            given[0, :-1] = torch.from_numpy(generation.experts.astype(int)).flatten(1)
            for name, experts in (("own", None), ("replayed", given)):
                with torch.no_grad():
                    ours, _ = policy(ids, columns * 0, columns, torch.ones(len(columns), dtype=torch.bool), experts)
                sums[name] += float((ours - torch.from_numpy(generation.logprobs)).abs().mean()) / len(generations)
                if experts is None:
                    own = routers.noted()[:-1].sort(-1).values
                    sampled = given[0, :-1].unflatten(-1, own.shape[1:]).sort(-1).values
                    sums["otherwise"] += float((own != sampled).any(-1).float().mean()) / len(generations)
    return sums


def _policy(folder: str, *, dtype: str = "float32", replay_experts: bool = False) -> PolicyModel:
    """The learner's model of the base in `folder`, with other weights."""
    policy = load_policy(
        PolicyConfig(
            base=folder,
            base_name="tiny",
            kind=WeightKind.FULL,
            lora_r=8,
            lora_alpha=8,
            dtype=dtype,
            temperature=SAMPLING.temperature,
            gradient_checkpointing=False,
            seed=1,
            cut=Cut(top_p=SAMPLING.top_p, top_k=SAMPLING.top_k, min_p=SAMPLING.min_p),
            replay_experts=replay_experts,
        )
    ).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return policy


def _published(policy: PolicyModel, base: Path) -> Snapshot:
    """The policy's weights as the learner writes them."""
    slots = {
        stored: Slot(stored, parameter.dtype, tuple(parameter.shape))
        for stored, parameter in ((stored, policy.get_parameter(name)) for name, stored in snapshot_names(policy, WeightKind.FULL).items())
    }
    form = StoredForm(policy.causal_lm, slots, base)
    tensors = {
        part.name: tensor.detach().contiguous()
        for name, stored in snapshot_names(policy, WeightKind.FULL).items()
        for part, tensor in zip(form.slots(stored), form.tensors(stored, policy.get_parameter(name)), strict=True)
    }
    folder = base / "v1"
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return Snapshot(ref=SnapshotRef(version=1, sha256="1"), kind=WeightKind.FULL, folder=folder)


async def _generate(
    name: str, folder: Path, snapshot: Snapshot, *, dtype: str = "float32", notes_experts: bool = False
) -> list[Generation]:
    config = EngineConfig(
        base=folder,
        kind=WeightKind.FULL,
        dtype=dtype,
        max_length=64,
        lora_rank=8,
        concurrency=16,
        options={},
        notes_experts=notes_experts,
    )
    engine = open_engine(name, config)
    await engine.start()
    try:
        await engine.install(snapshot)
        return await engine.generate(PROMPT, 16, SAMPLING)
    finally:
        await engine.close()


if __name__ == "__main__":
    for family in ("qwen3_moe", "mixtral"):
        for dtype, shifted in (("float32", 0.0), ("bfloat16", 0.0), ("float32", 0.02)):
            found = replay_differences(family, dtype, shifted)
            sys.stdout.write(f"{family} {dtype} {shifted} { {name: float(f'{value:.2g}') for name, value in found.items()} }\n")
