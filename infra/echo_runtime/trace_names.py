"""The names in traces, for which users search: of spans, of their attributes, and of the schema of the common ones."""

from __future__ import annotations

from enum import StrEnum

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The version of OpenTelemetry's semantic conventions with the common names below."""
SCOPE = "echoswarm"


class SpanName(StrEnum):
    """The spans of a group in order; each is the child of the one before. `TRAINING` is a whole step, in its own trace."""

    REQUEST = "echoswarm.request"
    """From the decision to issue the request until it is in the log."""
    GENERATION = "echoswarm.generation"
    """From the first token of an attempt to its last."""
    PUBLISH = "echoswarm.publish"
    """From the end of generation until the group's first member is in the log."""
    SCORE = "echoswarm.score"
    """One reward, for the samples that were scored together with the group's first member."""
    BATCH = "echoswarm.batch"
    """From the end of generation until a batch took the group. Linked with its scores."""
    STEP = "echoswarm.step"
    """The step that trained the group. Linked with the whole step."""
    TRAINING = "echoswarm.training"
    """A whole step. Linked with its traced groups."""


class Attribute(StrEnum):
    """The attributes of spans."""

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
