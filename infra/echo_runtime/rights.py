"""Checks a role's permissions before the role begins, because some missing permissions cause no error later.

Threads: `check_rights` blocks its caller; it sends several requests at once from its own threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

from confluent_kafka import KafkaException, TopicCollection, TopicPartition

from echo_bus.client.consumer_queries import committed, open_asker
from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.kafka_errors import refusal
from echo_bus.clock import Deadline
from echo_bus.errors import NotAuthorized, TransportError
from echo_runtime.logins import with_login
from echo_runtime.opening import open_cluster
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of_role, lacking
from echo_settings import Settings

logger = logging.getLogger(__name__)

# A cluster that does not answer counts as allowing all; the role waits for it elsewhere.
_ASK_S = 3.0
_LOOK_EVERY_S = 0.05
_TOPIC_CLOSED, _GROUP_CLOSED = "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"
# A partition that no topic has.
_NO_PARTITION = 1_000_000
_NO_ANSWER = frozenset({"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE"})


def check_rights(settings: Settings, role: str) -> bool:
    """Whether the cluster allows the login of `role` all that the role needs; False: it did not answer.

    Transactional ids are not checked, because taking one reports a refusal. Without security the answer is True. Raises NotAuthorized for
    a refused login and for missing permissions.
    """
    settings = with_login(settings, role)
    client = settings.kafka.client
    if str(client.get("security.protocol", "PLAINTEXT")).upper() == "PLAINTEXT":
        return True
    # With a certificate or a token the principal's name is not known here.
    principal = f"User:{client.get('sasl.username', 'LOGIN')}"
    cluster = open_cluster(settings, role)
    found = find_lacking(cluster, acls_of_role(role, Namespace(settings.kafka.namespace), principal))
    if found:
        raise refusal(*found, bootstrap=cluster.bootstrap)
    return found is not None


def find_lacking(cluster: KafkaCluster, wanted: Sequence[Acl], ask_s: float = _ASK_S) -> list[Acl] | None:
    """Those of `wanted` that the cluster refuses; None if it did not answer within `ask_s`. One without an answer counts as allowed.

    Raises NotAuthorized for a refused login.
    """
    topics = sorted({acl.name for acl in wanted if acl.resource is Resource.TOPIC})
    groups = [acl for acl in wanted if acl.resource is Resource.GROUP]
    with ThreadPoolExecutor(max_workers=len(groups) + 1) as pool:
        closed = {acl.name: pool.submit(_is_closed, cluster, acl, topics[0], ask_s) for acl in groups}
        allowed = _operations(cluster, topics, ask_s)
    return None if allowed is None else lacking(wanted, allowed, {name for name, answer in closed.items() if answer.result()})


def _operations(cluster: KafkaCluster, topics: Sequence[str], ask_s: float) -> dict[str, frozenset[str]] | None:
    """Topic → allowed operations, as `Acl.operation` names them, for existing topics. None: no answer."""
    # Keep the client until the answers arrive: it delivers them.
    admin = cluster.admin()
    answers: dict[str, Future[Any]] = admin.describe_topics(
        TopicCollection(list(topics)), include_authorized_operations=True, request_timeout=ask_s
    )
    deadline = Deadline.after(ask_s)
    while wait(answers.values(), _LOOK_EVERY_S).not_done and not deadline.expired():
        admin.poll(0)
        cluster.check_login()
    found = {}
    for topic, answer in answers.items():
        try:
            operations = answer.result(0).authorized_operations
        except TimeoutError:
            return None
        except KafkaException as exc:
            if exc.args[0].name() in _NO_ANSWER:
                return None
            if exc.args[0].name() == _TOPIC_CLOSED:
                found[topic] = frozenset[str]()
            continue
        # READ → Read, DESCRIBE_CONFIGS → DescribeConfigs.
        found[topic] = frozenset(operation.name.title().replace("_", "") for operation in operations)
    return found


def _is_closed(cluster: KafkaCluster, acl: Acl, topic: str, ask_s: float) -> bool:
    """Whether the cluster refuses the operation on the group, or on a group with the prefix."""
    group = f"{acl.name}reader" if acl.prefixed else acl.name
    try:
        with closing(open_asker(cluster, group, "")) as asker:
            committed(asker, [(topic, 0)], ask_s, asks_for=group)
            if acl.operation == "Read":
                # Joining needs this permission, and Faust waits for ever without it. This commit needs it too and changes nothing.
                asker.commit(offsets=[TopicPartition(topic, _NO_PARTITION, 0)], asynchronous=False)
    except KafkaException as exc:
        return bool(exc.args[0].name() == _GROUP_CLOSED)
    except NotAuthorized as exc:
        return exc.resource is Resource.GROUP
    except TransportError as exc:
        logger.debug("The group %s could not be asked after: %s", acl.name, exc)
    return False
