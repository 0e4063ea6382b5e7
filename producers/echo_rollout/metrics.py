"""Every metric of the feeder, the offline producer and the workers: name, labels, and meaning in one line."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# From a warm adapter of half a megabyte on tmpfs to a whole model over a slow network.
_INSTALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


class FeederMetrics:
    """The feeder's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.issued = Counter("echo_rollout_requests_issued", "Requests written.", ["purpose"], registry=registry)
        self.reissued = Counter(
            "echo_rollout_requests_reissued", "Requests written again for a seq issued before.", ["why"], registry=registry
        )
        self.outstanding = Gauge("echo_rollout_requests_outstanding", "Requests that no worker has finished.", registry=registry)
        self.next_seq = Gauge("echo_rollout_next_seq", "The seq that is issued next.", registry=registry)
        self.aborted = Counter("echo_rollout_issue_aborted", "Batches of requests that the cluster rolled back.", registry=registry)


class OfflineMetrics:
    """The offline producer's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.groups = Counter("echo_rollout_offline_groups", "Groups of logged episodes put into the log.", registry=registry)
        self.episodes = Counter("echo_rollout_offline_episodes", "Logged episodes put into the log.", registry=registry)
        self.skipped = Counter(
            "echo_rollout_offline_skipped", "Episodes of the file that cannot be trained, by reason.", ["reason"], registry=registry
        )
        self.next_seq = Gauge("echo_rollout_offline_next_seq", "The seq that is allocated next.", registry=registry)
        self.aborted = Counter("echo_rollout_offline_aborted", "Batches of groups that the cluster rolled back.", registry=registry)


class WorkerMetrics:
    """A worker's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.groups = Counter("echo_rollout_groups", "Groups that ended, by how.", ["outcome"], registry=registry)
        self.failed = Counter(
            "echo_rollout_groups_failed", "Groups that yielded no complete set of trajectories.", ["reason"], registry=registry
        )
        self.trajectories = Counter("echo_rollout_trajectories", "Trajectories acknowledged.", registry=registry)
        self.tokens = Counter("echo_rollout_generated_tokens", "Tokens generated and acknowledged.", registry=registry)
        self.empty = Counter("echo_rollout_empty_generations", "Generations without a token; each is tried once more.", registry=registry)
        self.group_seconds = Histogram("echo_rollout_group_seconds", "From the start of a group to its last token.", registry=registry)
        self.in_flight = Gauge("echo_rollout_groups_in_flight", "Groups taken and not yet acknowledged.", registry=registry)
        self.waiting = Gauge("echo_rollout_groups_waiting", "Groups held until the weights they require are installed.", registry=registry)
        self.undelivered = Gauge("echo_rollout_groups_undelivered", "Finished groups that Kafka has not acknowledged.", registry=registry)
        self.undelivered_seconds = Gauge(
            "echo_rollout_undelivered_seconds",
            "For how long the oldest of them has waited; above 5 no request is taken.",
            registry=registry,
        )
        self.installed = Gauge("echo_rollout_installed_version", "Version whose weights are installed.", registry=registry)
        self.installs = Counter("echo_rollout_installs", "Snapshots that arrived, by how that ended.", ["outcome"], registry=registry)
        self.install_seconds = Histogram(
            "echo_rollout_install_seconds", "From seeing a manifest to its acknowledgement.", registry=registry, buckets=_INSTALL_BUCKETS
        )
        self.peer_bytes = Counter(
            "echo_rollout_peer_bytes",
            "Bytes of snapshots where workers pass them on: sent to and received from others, and read from the log or the store (truth).",
            ["way"],
            registry=registry,
        )
        self.delta_bytes = Counter(
            "echo_rollout_delta_bytes", "Bytes of deltas from which snapshots were made, in place of the whole.", registry=registry
        )
        self.peers_left_out = Counter(
            "echo_rollout_peers_left_out",
            "Times that another worker was left out as a source of weights, by why.",
            ["why"],
            registry=registry,
        )
        self.skipped = Counter(
            "echo_rollout_versions_skipped", "Published versions that were passed over for a newer one.", registry=registry
        )
