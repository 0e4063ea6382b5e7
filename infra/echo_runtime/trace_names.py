"""The names in traces: of spans, of their attributes, and of the schema that the common ones follow. Users search for them by name."""

from __future__ import annotations

from enum import StrEnum

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""OpenTelemetry's semantic conventions, in the version that the names below are taken from."""
SCOPE = "echoswarm"


class SpanName(StrEnum):
    """The way of a group, in order; each is the child of the one before. `TRAINING` is one step as a whole, in a trace of its own."""

    REQUEST = "echoswarm.request"
    """From the decision to issue it until it is in the log."""
    GENERATION = "echoswarm.generation"
    """From the first token of an attempt to its last."""
    PUBLISH = "echoswarm.publish"
    """From there until its first member is in the log."""
    SCORE = "echoswarm.score"
    """One reward of all that were scored together with the first member."""
    BATCH = "echoswarm.batch"
    """From the end of generation until it was chosen. Linked with its scores."""
    STEP = "echoswarm.step"
    """The step that trained it. Linked with the step as a whole."""
    TRAINING = "echoswarm.training"
    """A step as a whole. Linked with the groups in it that are followed."""


class Attribute(StrEnum):
    """What spans say."""

    RUN = "echoswarm.run"
    GROUP = "echoswarm.group"
    PURPOSE = "echoswarm.purpose"
    ATTEMPT = "echoswarm.attempt"
    VERSION = "echoswarm.version"
    """Of the policy: the oldest that generated, or the one that was trained."""
    WORKER = "echoswarm.worker"
    ENGINE = "echoswarm.engine"
    REWARD = "echoswarm.reward"
    NUM_SAMPLES = "echoswarm.num_samples"
    NUM_GROUPS = "echoswarm.num_groups"
    STALENESS = "echoswarm.staleness"
    SYSTEM = "messaging.system"
    DESTINATION = "messaging.destination.name"
    SERVICE = "service.name"
    SERVICE_NAMESPACE = "service.namespace"
    SERVICE_INSTANCE = "service.instance.id"
    SERVICE_VERSION = "service.version"
