"""Every metric of the feeder, the offline producer and the workers: name, labels, and meaning in one line."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from echo_bus.metrics import makers

_PREFIX = "echo_rollout"
# From a warm adapter of half a megabyte on tmpfs to a whole model over a slow network.
_INSTALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


class FeederMetrics:
    """The feeder's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, _ = makers(_PREFIX, registry)
        self.issued = counter("requests_issued", "Requests written.", ["purpose"])
        self.reissued = counter("requests_reissued", "Requests written again for a seq issued before.", ["why"])
        self.outstanding = gauge("requests_outstanding", "Requests that no worker has finished.")
        self.next_seq = gauge("next_seq", "The seq that is issued next.")
        self.aborted = counter("issue_aborted", "Batches of requests that the cluster rolled back.")


class OfflineMetrics:
    """The offline producer's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, _ = makers(_PREFIX, registry)
        self.groups = counter("offline_groups", "Groups of logged episodes put into the log.")
        self.episodes = counter("offline_episodes", "Logged episodes put into the log.")
        self.skipped = counter("offline_skipped", "Episodes of the file that cannot be trained, by reason.", ["reason"])
        self.next_seq = gauge("offline_next_seq", "The seq that is allocated next.")
        self.aborted = counter("offline_aborted", "Batches of groups that the cluster rolled back.")


class WorkerMetrics:
    """A worker's collectors, made against the registry that is given."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge, histogram = makers(_PREFIX, registry)
        self.groups = counter("groups", "Groups that ended, by how.", ["outcome"])
        self.failed = counter("groups_failed", "Groups that yielded no complete set of trajectories.", ["reason"])
        self.trajectories = counter("trajectories", "Trajectories acknowledged.")
        self.tokens = counter("generated_tokens", "Tokens generated and acknowledged.")
        self.empty = counter("empty_generations", "Generations without a token; each is tried once more.")
        self.group_seconds = histogram("group_seconds", "From the start of a group to its last token.")
        self.in_flight = gauge("groups_in_flight", "Groups taken and not yet acknowledged.")
        self.waiting = gauge("groups_waiting", "Groups held until the weights they require are installed.")
        self.undelivered = gauge("groups_undelivered", "Finished groups that Kafka has not acknowledged.")
        self.undelivered_seconds = gauge("undelivered_seconds", "For how long the oldest of them has waited; above 5 no request is taken.")
        self.installed = gauge("installed_version", "Version whose weights are installed.")
        self.installs = counter("installs", "Snapshots that arrived, by how that ended.", ["outcome"])
        self.install_seconds = histogram("install_seconds", "From seeing a manifest to its acknowledgement.", buckets=_INSTALL_BUCKETS)
        self.peer_bytes = counter(
            "peer_bytes",
            "Bytes of snapshots where workers pass them on: sent to and received from others, and read from the log or the store (truth).",
            ["way"],
        )
        self.delta_bytes = counter("delta_bytes", "Bytes of deltas from which snapshots were made, in place of the whole.")
        self.peers_left_out = counter("peers_left_out", "Times that another worker was left out as a source of weights, by why.", ["why"])
        self.skipped = counter("versions_skipped", "Published versions that were passed over for a newer one.")
