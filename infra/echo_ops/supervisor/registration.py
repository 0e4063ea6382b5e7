"""What is done once on the cluster before a run begins: check that no other run owns its namespace, and make its topics."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawConsumer
from echo_bus.client.consumer_queries import committed, open_asker
from echo_bus.client.kafka import KafkaCluster
from echo_bus.errors import TopicMissing, TransportError
from echo_bus.requests.dispatch import WORKERS_GROUP
from echo_learner.commit.session import read_tip, refuse_if_alive
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_plan import Kind
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.topics import REQUESTS

_REACH_S = 30.0
_COORDINATOR_S = 1.0
logger = logging.getLogger(__name__)
FOLDER_LOCK = "up.lock"


def refuse_if_owned(cluster: KafkaCluster, bus: Bus, run_id: str, *, takeover: bool) -> None:
    """Raise UserError if a learner is alive in the namespace of `bus`, before any process of this run has joined, fenced or written.

    `takeover`: a learner of the same run may be alive. Raises TransportError. The learner and the other roles check again by themselves.
    """
    cluster.check(_REACH_S)
    try:
        claim = read_tip(bus, run_id).claim
    except TopicMissing:
        return
    refuse_if_alive(bus, claim, run_id=run_id, takeover=takeover)


def make_topics(cluster: KafkaCluster, namespace: Namespace, *, replicas: int | None = None) -> str:
    """Create missing topics and wait until all can be used. Other differences stay: a start needs usable topics, and the operator changes
    them (`echoswarm topics apply`). Returns a sentence on the differences; empty: there are none.

    Raises UserError if a topic is missing and cannot be made, TransportError if a topic has no leader.
    """
    cluster.check(_REACH_S)
    admin = TopicAdmin(cluster, namespace, replicas=replicas)
    plan = admin.plan()
    if plan.unmakeable:
        raise UserError(
            f"{len(plan.unmakeable)} topics of {namespace.name!r} are missing, {plan.unmakeable[0].topic!r} for one, and cannot be made: "
            f"{plan.unmakeable[0].why}.",
            hint="`echoswarm doctor` says which brokers answer.",
        )
    # A cluster that never had a group makes its offsets topic at the first request for offsets, and does not answer that request. Send
    # one here, or the first role waits for its whole time-out.
    asker = open_asker(cluster, namespace.group(WORKERS_GROUP), namespace.client_id("view"))
    asking = threading.Thread(target=_ask, args=(asker, namespace.topic(REQUESTS)))
    asking.start()
    try:
        admin.apply(plan.only(Kind.CREATE))
        admin.wait_usable(plan.specs)
    finally:
        asking.join()
        asker.close()
    differing = {step.topic for step in plan.steps if step.kind is not Kind.CREATE}
    return f"{len(differing)} topics differ from their files; `echoswarm topics plan` shows how" if differing else ""


def _ask(asker: RawConsumer, physical: str) -> None:
    """Ask for the group's committed offsets; the answer does not matter."""
    with suppress(TransportError):
        committed(asker, [(physical, 0)], _COORDINATOR_S)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Make `folder` and hold its lock. Raises UserError, before anything in it is changed, if another process holds the lock.

    The lock is the system's (flock), so a file that stays behind locks nothing. A file system without locks gives only a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FOLDER_LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"A run is going on in {folder} already ({file.read().strip() or 'its process is not known'}).",
                hint="Stop it first, or give this run a [checkpoint] folder and a [run] name of its own. Nothing was changed.",
            ) from None
        except OSError as exc:
            logger.warning("%s cannot be locked (%s): take care that only one `echoswarm up` uses it", folder, exc.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
