"""One frozen model per section of the file, a sentence under each field. Unknown keys are refused in `load.py`, by name."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from echo_schemas.naming import Namespace

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Section(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunSettings(Section):
    """[run]: what this run is called and which of ECHO's protocols it follows."""

    name: str = "demo"
    """Names the run in every record; letters, digits, '.', '_' and '-'."""
    mode: Literal["asynchronous", "sequential"] = "asynchronous"
    """`asynchronous` generates continuously within a staleness budget; `sequential` asks for each batch and has staleness 0."""
    seed: int = 0
    """Decides prompts and the order of samples; the same seed gives the same prompts."""

    @field_validator("name")
    @classmethod
    def _name_is_part_of_keys(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            message = f"{name!r} cannot be part of a key; use letters, digits, '.', '_' and '-'"
            raise ValueError(message)
        return name


class KafkaSettings(Section):
    """[kafka]: which cluster, and under which names."""

    bootstrap: str = "embedded"
    """`embedded` finds the broker that `echoswarm kafka up` started; otherwise host:port, several separated by commas."""
    namespace: str = "echo.demo"
    """Prefix of every topic, group, client id and transactional id; one running pipeline per namespace."""
    group_protocol: Literal["classic", "consumer"] = "classic"
    """`classic` with cooperative-sticky assignment, or `consumer` (KIP-848), where sessions and heartbeats are the broker's settings."""
    # Not in the repr: it may hold a password.
    client: dict[str, str | int | float | bool] = Field(default_factory=dict, repr=False)
    """Any librdkafka property, as [kafka.client]; wins over the project's own. Passwords in files: `"sasl.password_file" = "/run/…"`."""

    @field_validator("namespace")
    @classmethod
    def _namespace_is_legal(cls, namespace: str) -> str:
        Namespace(namespace)
        return namespace


class RegistrySettings(Section):
    """[registry]: where schema ids come from."""

    url: str = ""
    """A Confluent-compatible registry; empty: ids from registry.lock.json, and no service is needed."""
    user: str = ""
    """User for basic authentication; empty: none."""
    password: SecretStr = SecretStr("")
    """Its password; better given as `password_file` or ECHO_REGISTRY__PASSWORD."""
    ca_file: str = ""
    """CA certificate of the registry, PEM."""

    def client_properties(self) -> dict[str, Any]:
        """What the registry client wants besides the address."""
        properties: dict[str, Any] = {}
        if self.user:
            properties["basic.auth.user.info"] = f"{self.user}:{self.password.get_secret_value()}"
        if self.ca_file:
            properties["ssl.ca.location"] = self.ca_file
        return properties


class TaskSettings(Section):
    """[task]: what is asked."""

    name: str = "reverse-digits"
    """A built-in task, an entry point, or `package.module:attribute`."""


class LoraSettings(Section):
    """The adapter's shape."""

    r: int = Field(default=32, ge=1)
    """Rank."""
    alpha: int = Field(default=32, ge=1)
    """Scale; the adapter's output is multiplied by alpha / r."""


class PolicySettings(Section):
    """[policy]: the model, and what of it is trained."""

    base: str = "demo:tiny-qwen3"
    """A model folder, or `demo:tiny-qwen3`, which is made on the spot."""
    update: Literal["lora", "full"] = "lora"
    """Train an adapter, or all weights."""
    lora: LoraSettings = LoraSettings()
    """Shape of the adapter."""


class RolloutSettings(Section):
    """[rollout]: how answers are sampled."""

    engine: str = "vllm"
    """Which engine the workers run."""
    workers: int = Field(default=1, ge=0)
    """Workers that `echoswarm up` starts on this machine."""
    group_size: int = Field(default=16, ge=1)
    """Samples per prompt; advantages are relative within a group."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of sampling."""
    max_new_tokens: int = Field(default=8, ge=1)
    """Most tokens generated for one sample."""


class LearnerSettings(Section):
    """[learner]: how the policy is updated."""

    groups_per_step: int = Field(default=32, ge=1)
    """Prompts per training step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per training step; the groups are split among them."""
    loss: str = "tis"
    """A built-in loss, or `package.module:attribute`."""
    lr: float = Field(default=1.5e-3, gt=0)
    """Learning rate."""
    steps: int = Field(default=100, ge=0)
    """Training steps; 0: until stopped."""


class StalenessSettings(Section):
    """[staleness]: how old a sample may be, and what happens to older ones."""

    budget: int = Field(default=3, ge=0)
    """S: a sample is trained only if 0 ≤ learner version − its oldest version ≤ S."""
    publication_period: int | None = Field(default=None, ge=1)
    """kappa: a snapshot is published every kappa steps; none: max(1, S − 1), and 1 in sequential mode."""
    admission: Literal["free", "pace"] = "pace"
    """`pace` issues no more prompts than the budget can absorb; `free` issues as fast as workers take them."""
    over_budget: Literal["drop", "withhold", "downweight"] = "drop"
    """What becomes of a sample above the budget."""
    min_group_size: int = Field(default=2, ge=1)
    """A group that keeps fewer samples than this is dropped whole."""


class CheckpointSettings(Section):
    """[checkpoint]: where steps become durable."""

    folder: str = "runs/demo"
    """A folder on a disk that survives the process."""
    every: int = Field(default=1, ge=1)
    """Steps between checkpoints; divides the publication period."""
    keep: int = Field(default=3, ge=2)
    """Checkpoints kept besides those that the log still needs."""


class MetricsSettings(Section):
    """[metrics]: /metrics, /healthz and /readyz of each process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port; 0 takes a free one."""


class Settings(Section):
    """A whole file."""

    run: RunSettings = RunSettings()
    kafka: KafkaSettings = KafkaSettings()
    registry: RegistrySettings = RegistrySettings()
    task: TaskSettings = TaskSettings()
    policy: PolicySettings = PolicySettings()
    rollout: RolloutSettings = RolloutSettings()
    rewards: dict[str, float] = Field(default_factory=lambda: {"exact": 1.0})
    """[rewards]: reward name = weight."""
    learner: LearnerSettings = LearnerSettings()
    staleness: StalenessSettings = StalenessSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    metrics: MetricsSettings = MetricsSettings()

    @property
    def publication_period(self) -> int:
        """kappa in force."""
        if self.staleness.publication_period is not None:
            return self.staleness.publication_period
        return 1 if self.run.mode == "sequential" else max(1, self.staleness.budget - 1)

    @property
    def budget(self) -> int:
        """S in force: 0 in sequential mode."""
        return 0 if self.run.mode == "sequential" else self.staleness.budget

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        kappa, budget = self.publication_period, self.budget
        if self.run.mode == "sequential" and kappa != 1:
            message = "[staleness] publication_period must be 1 in sequential mode, where every step starts from the newest weights"
            raise ValueError(message)
        if kappa > budget + 1:
            message = (
                f"[staleness] publication_period = {kappa} is above budget + 1 = {budget + 1}: every sample of the last steps before a "
                f"publication would be too old; write publication_period = {budget + 1} or budget = {kappa - 1}"
            )
            raise ValueError(message)
        if kappa % self.checkpoint.every:
            message = (
                f"[checkpoint] every = {self.checkpoint.every} does not divide the publication period {kappa}, so a published version "
                f"would have no checkpoint; write every = 1, or a divisor of {kappa}"
            )
            raise ValueError(message)
        if self.staleness.min_group_size > self.rollout.group_size:
            message = (
                f"[staleness] min_group_size = {self.staleness.min_group_size} is above [rollout] group_size = {self.rollout.group_size}: "
                f"no group would ever be trained; write min_group_size = {self.rollout.group_size} or less"
            )
            raise ValueError(message)
        if self.learner.groups_per_step % self.learner.updates_per_step:
            message = (
                f"[learner] updates_per_step = {self.learner.updates_per_step} does not divide groups_per_step = "
                f"{self.learner.groups_per_step}: the updates must get equally many groups"
            )
            raise ValueError(message)
        return self
