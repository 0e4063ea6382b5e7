"""One frozen model per section of the file, a sentence under each field. Unknown keys are refused in `load.py`, by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from echo_schemas.naming import Namespace
from echo_settings.evaluation import EvalSettings, check_evaluations
from echo_settings.learner import CheckpointSettings, LearnerSettings, StalenessSettings, check_rate
from echo_settings.offline import OfflineSettings
from echo_settings.pool import CoordinatorSettings, DeviceSettings, PoolSettings, check_pool
from echo_settings.section import PartOfKey, Section, without_credentials
from echo_settings.trust import TrustSettings
from echo_settings.weights import WeightsSettings


class RunSettings(Section):
    """[run]: what this run is called and which of ECHO's protocols it follows."""

    name: PartOfKey = "demo"
    """Names the run in every record; letters, digits, '.', '_' and '-'."""
    mode: Literal["asynchronous", "sequential"] = "asynchronous"
    """`asynchronous` generates continuously within a staleness budget; `sequential` asks for each batch and has staleness 0."""
    seed: int = 0
    """Decides prompts and the order of samples; the same seed gives the same prompts."""
    drain_s: float = Field(default=2.5, gt=0)
    """Most seconds from SIGTERM to the end of a process. The next process repeats unfinished work; nothing is lost."""


def _refuse_nothing(address: str) -> str:
    if not address.strip():
        raise ValueError("is empty; write host:port, or embedded")
    return address


class KafkaSettings(Section):
    """[kafka]: which cluster, and under which names."""

    bootstrap: Annotated[
        str,
        without_credentials('write them into [kafka.client]: "sasl.username", and "sasl.password_file" for the password', separator=","),
        AfterValidator(_refuse_nothing),
    ] = "embedded"
    """`embedded` finds the broker that `echoswarm kafka up` started; otherwise host:port, several separated by commas."""
    namespace: Annotated[str, AfterValidator(lambda name: Namespace(name).name)] = "echo.demo"
    """Prefix of every topic, group, client id and transactional id; one running pipeline per namespace."""
    replicas: int | None = Field(default=None, ge=1)
    """Copies of each topic, fixed when the namespace is created; none: 3, or 1 on a cluster of one broker. Set it on two brokers."""
    group_protocol: Literal["classic", "consumer"] = "classic"
    """`classic` with cooperative-sticky assignment, or `consumer` (KIP-848), where sessions and heartbeats are the broker's settings."""
    logins: str = ""
    """A folder with a login for each role, `<role>.properties`; empty: all use [kafka.client]. A secured embedded Kafka has it."""
    # Not in the repr: it may hold a password.
    client: dict[str, str | int | float | bool] = Field(default_factory=dict, repr=False)
    """Any librdkafka property, as [kafka.client]; wins over the project's own. Passwords in files: `"sasl.password_file" = "/run/…"`."""


class RegistrySettings(Section):
    """[registry]: where schema ids come from."""

    url: Annotated[str, without_credentials("write them into [registry] user and password_file")] = ""
    """A Confluent-compatible registry; empty: ids from registry.lock.json, without a service."""
    user: str = ""
    """User for basic authentication; empty: none."""
    password: SecretStr = SecretStr("")
    """Its password; better given as `password_file` or ECHO_REGISTRY__PASSWORD."""
    ca_file: str = ""
    """CA certificate of the registry, PEM."""

    def client_properties(self) -> dict[str, Any]:
        """The registry client's properties besides the address."""
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
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's arguments, as [task.options]. Published with the run, so write no secrets here."""


class LoraSettings(Section):
    """The adapter's shape."""

    r: int = Field(default=32, ge=1)
    """Rank."""
    alpha: int = Field(default=32, ge=1)
    """Scale; the adapter's output is multiplied by alpha / r."""


class PolicySettings(Section):
    """[policy]: the model, and what of it is trained."""

    base: str = "demo:tiny-qwen3"
    """A model folder, or one that is made on the spot: `demo:tiny-qwen3`, also with `-sort`, `-sokoban`, `-knights-knaves`; these have 256
    positions, and tokens for their own task alone."""
    update: Literal["lora", "full"] = "lora"
    """Train an adapter, or all weights."""
    lora: LoraSettings = LoraSettings()
    """Shape of the adapter."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of the model in workers and learner alike: different ones bias the ratio."""
    max_length: int = Field(default=64, ge=2)
    """Most tokens of prompt and answer together; the workers' context and the learner's bound."""
    replay_experts: bool = False
    """For a mixture of experts: workers record the experts of each token, and the learner uses the same ones (docs/running.md)."""


class RolloutSettings(Section):
    """[rollout]: how answers are sampled."""

    engine: str = "vllm"
    """`vllm`, `transformers`, `openai`, `parallax`, or `package.module:attribute`."""
    workers: int = Field(default=1, ge=0)
    """Workers that `echoswarm up` starts on this machine."""
    group_size: int = Field(default=16, ge=1)
    """Samples per prompt; advantages are relative within a group."""
    temperature: float = Field(default=1.0, ge=0.01)
    """Softmax temperature of sampling; engines do not tell smaller ones from 0."""
    max_new_tokens: int = Field(default=8, ge=1)
    """Most tokens generated for one sample."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer in an episode of several turns, also in evaluations; none: `max_new_tokens` alone is the limit."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass: less likely tokens beyond it are never drawn. The learner cuts its own distribution likewise (docs/running.md)."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all. The learner does likewise."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens below this fraction of the most likely one are never drawn. The learner does likewise."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, besides the model's own end token."""
    groups_in_flight: int = Field(default=32, ge=1)
    """Requests that one worker works on at once."""
    depth: int = Field(default=1, ge=1)
    """Requests that may wait or be worked on in one partition of `requests`; times its partitions, the window of the feeder."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """The least time limit of a request. The limit in force follows what was measured: twice the steps within which a request is trained,
    or four times what the slowest of the last requests took, if that is more; none before a step and a request were measured."""
    resends: int = Field(default=2, ge=0)
    """How often a request without a result is sent again before its seq is dropped: an expired one, and in sequential mode also a failed
    one."""
    probe_size: int = Field(default=4, ge=0)
    """Samples per published version on which learner and worker compare log-probabilities; 0 turns it off."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between a worker's status records."""
    price_per_hour: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What one worker costs, in any currency."""
    price_file: str = ""
    """A file with one number, the price of an hour, read again before each heartbeat when it has changed: for prices that move, as those of
    spot machines. Empty: `price_per_hour`."""
    missing_logprobs: Literal["refuse", "recompute"] = "refuse"
    """For an engine without log-probabilities: do not start it, or let the learner compute them when it trains (importance weight 1)."""
    unproved_versions: Literal["refuse", "allow"] = "refuse"
    """For an engine that cannot prove which version it serves: do not start it, or rely on the learner's comparison."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Any argument of the engine, as [rollout.options]; wins over the project's own."""
    devices: tuple[DeviceSettings, ...] = ()
    """The devices of one worker, each as [[rollout.devices]]; none: the model is whole on one."""
    pool: tuple[PoolSettings, ...] = ()
    """Kinds of workers that differ from one another, each as [[rollout.pool]]; none: all workers are as [rollout] says."""

    @model_validator(mode="after")
    def _pool_is_whole(self) -> RolloutSettings:
        check_pool(self.pool, has_workers="workers" in self.model_fields_set)
        return self


class ScoringSettings(Section):
    """[scoring]: how the reward application runs reward functions."""

    workers: int = Field(default=1, ge=0)
    """Reward processes that `echoswarm up` starts."""
    processes: int = Field(default=0, ge=0)
    """Further processes of each of them for synchronous functions; 0: they run in the application itself, without a time limit."""
    memory_mb: int = Field(default=8192, ge=0)
    """Most memory of one of these processes, in MiB; a function that needs more fails. 0: no limit."""
    concurrency: int = Field(default=64, ge=1)
    """Calls of one asynchronous function that run at once."""
    timeout_s: float = Field(default=5.0, gt=0)
    """For one call; a function's own limit wins."""
    retries: int = Field(default=1, ge=0)
    """Further attempts after a failure; a time-out is not tried again."""
    deadline_s: float = Field(default=300.0, gt=0)
    """How long a whole group waits for a required reward before its default stands in, or its samples are dropped."""
    applications: dict[str, str] = Field(default_factory=dict)
    """[scoring.applications]: reward name = the application whose records count; the run's own is `main`. For other rewards the first
    record counts, from any application."""
    when_failing: Literal["stop", "go_on"] = "stop"
    """When a weighted reward has failed for as many samples as a step has, and for longer than `deadline_s`: end the run with its
    message, or train on without it."""


class StoreSettings(Section):
    """[store]: storage for large snapshots, outside the log."""

    uri: Annotated[
        str, without_credentials("give them to each process as the store's driver reads them, for S3 in AWS_ACCESS_KEY_ID and so on")
    ] = ""
    """An fsspec address such as s3://bucket/path or file:///path; empty: the folder `snapshots` beside the checkpoints, for workers on the
    learner's machine."""
    above_mb: int = Field(default=1024, ge=0)
    """Snapshots of at least this many MiB go to the store; smaller ones travel through `weights.chunks`."""
    keep: int | None = Field(default=None, ge=2)
    """Newest snapshots kept in the store; older ones are removed once a newer one is public. None: as many as [checkpoint] keep in the
    folder beside the checkpoints, all of them at another address."""


class DeadLetterSettings(Section):
    """[dead_letters]: messages that cannot be read. Each is copied to `<topic>.dlq`, and reading goes on."""

    per_writer: int = Field(default=60, ge=0)
    """So many per minute, from one writer (as the record's `ce_source` names it) and in each reading process, are copied with their bytes
    and logged one by one. Above that, a copy holds only the message's position and the error, and the log gives the number."""
    per_minute: int = Field(default=600, ge=0)
    """The same for all writers together."""
    stop_after: int = Field(default=0, ge=0)
    """So many in a row end the reading process, which skips none of them: for a cluster with trusted writers only, where they mean a wrong
    release or registry. 0: never."""


class MetricsSettings(Section):
    """[metrics]: /metrics, /healthz and /readyz of each process."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port; 0 takes a free one."""


class LogsSettings(Section):
    """[logs]: the log of each process, on standard error or in the file of `run --log-file`."""

    format: Literal["text", "json"] = "text"
    """`text`: a line for people; `json`: one object a line, with time, level, logger, message, run, role, process, release, and the group
    and the version of the policy where they are known."""
    level: Literal["info", "debug"] = "info"
    """`debug`: also each step of each group, from its request to its training: several lines a group."""


class TracesSettings(Section):
    """[traces]: OpenTelemetry traces, one a group across all processes; needs the extra `otel`."""

    share: float = Field(default=0.0, ge=0, le=1)
    """The share of groups that are traced, the same groups in every process. 0: none, and OpenTelemetry is not loaded."""
    endpoint: Annotated[str, without_credentials("give them to each process in OTEL_EXPORTER_OTLP_HEADERS")] = ""
    """Where spans go, OTLP over HTTP with the path: `http://collector:4318/v1/traces`. Empty: as OpenTelemetry's own variables of the
    environment say (OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS)."""


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
    scoring: ScoringSettings = ScoringSettings()
    learner: LearnerSettings = LearnerSettings()
    staleness: StalenessSettings = StalenessSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    store: StoreSettings = StoreSettings()
    weights: WeightsSettings = WeightsSettings()
    eval: tuple[EvalSettings, ...] = ()
    offline: OfflineSettings = OfflineSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    trust: TrustSettings = TrustSettings()
    metrics: MetricsSettings = MetricsSettings()
    logs: LogsSettings = LogsSettings()
    traces: TracesSettings = TracesSettings()

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

    @property
    def lead(self) -> int:
        """The lead in force: 0 in sequential mode."""
        return 0 if self.run.mode == "sequential" else self.budget if self.staleness.lead is None else self.staleness.lead

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        kappa, budget = self.publication_period, self.budget
        if self.run.mode == "sequential" and kappa != 1:
            raise ValueError("[staleness] publication_period must be 1 in sequential mode, where every step starts from the newest weights")
        if self.run.mode == "sequential" and self.offline.episodes:
            raise ValueError('[offline] episodes answer no request of a sequential learner; write [run] mode = "asynchronous"')
        if self.run.mode == "sequential" and self.coordinator.enabled:
            raise ValueError('[coordinator] sizes a pool that generates ahead of the learner; write [run] mode = "asynchronous"')
        if budget < 1 and self.coordinator.enabled:
            message = "[coordinator] has nothing to size where [staleness] budget = 0 lets nothing overlap; write budget = 1 or more"
            raise ValueError(message)
        if kappa > budget + 1:
            raise ValueError(
                f"[staleness] publication_period = {kappa} is above budget + 1 = {budget + 1}: every sample of the last steps before a "
                f"publication would be too old; write publication_period = {budget + 1} or budget = {kappa - 1}"
            )
        lead = self.staleness.lead
        if self.run.mode != "sequential" and lead is not None and not kappa - 1 <= lead <= budget:
            raise ValueError(
                f"[staleness] lead = {lead} does not lie between publication_period - 1 = {kappa - 1}, below which the learner would "
                f"starve before each publication, and budget = {budget}"
            )
        if kappa % self.checkpoint.every:
            raise ValueError(
                f"[checkpoint] every = {self.checkpoint.every} does not divide the publication period {kappa}, so a published version "
                f"would have no checkpoint; write every = 1, or a divisor of {kappa}"
            )
        if self.staleness.min_group_size > self.rollout.group_size:
            raise ValueError(
                f"[staleness] min_group_size = {self.staleness.min_group_size} is above [rollout] group_size = {self.rollout.group_size}: "
                f"no group would ever be trained; write min_group_size = {self.rollout.group_size} or less"
            )
        if self.rollout.max_new_tokens >= self.policy.max_length:
            raise ValueError(
                f"[rollout] max_new_tokens = {self.rollout.max_new_tokens} leaves no room for a prompt within [policy] max_length = "
                f"{self.policy.max_length}"
            )
        if self.rollout.max_turn_tokens is not None and self.rollout.max_turn_tokens > self.rollout.max_new_tokens:
            raise ValueError(
                f"[rollout] max_turn_tokens = {self.rollout.max_turn_tokens} is above max_new_tokens = {self.rollout.max_new_tokens}, "
                "which all answers of an episode share: no answer could be so long; write a smaller one, or leave it out"
            )
        if self.learner.kl_estimator == "k1" and self.learner.kl_in == "loss":
            raise ValueError(
                '[learner] kl_estimator = "k1" has a gradient of zero in the mean as a term of the loss; write kl_in = "advantage", or '
                'kl_estimator = "k2" or "k3"'
            )
        check_rate(self.learner)
        if self.learner.compile and self.policy.replay_experts:
            raise ValueError(
                "[learner] compile does not go with [policy] replay_experts, which tells routers inside of the layers where tokens go; "
                "write compile = false"
            )
        if self.learner.groups_per_step % self.learner.updates_per_step:
            raise ValueError(
                f"[learner] updates_per_step = {self.learner.updates_per_step} does not divide groups_per_step = "
                f"{self.learner.groups_per_step}: the updates must get equally many groups"
            )
        return self

    @model_validator(mode="after")
    def _applications_judge(self) -> Settings:
        judges = {*self.rewards, *(name for section in self.eval for name in section.rewards)}
        for name in self.scoring.applications:
            if name not in judges:
                raise ValueError(f"[scoring.applications] names {name!r}, which is no reward of this file: {', '.join(sorted(judges))}")
        return self

    @model_validator(mode="after")
    def _evaluations_fit(self) -> Settings:
        check_evaluations(
            self.eval,
            run_seed=self.run.seed,
            kappa=self.publication_period,
            max_length=self.policy.max_length,
            rewards=tuple(self.rewards),
        )
        return self
