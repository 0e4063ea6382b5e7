"""Heavy libraries load only in the modules that adapt them."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "torch", "vllm", "deepspeed", "faust", "transformers", "peft", "reasoning_gym", "math_verify", "sympy", "pyspiel", "pyarrow", "duckdb",
    "cryptography", "opentelemetry", "pyiceberg", "sqlalchemy",
}  # fmt: skip
# Everything that a process of any role may import before it knows its role.
LIGHT = [
    "echo_schemas.codec",
    "echo_schemas.registry",
    "echo_schemas.topic_files",
    "echo_core.assembly",
    "echo_core.batch_choice",
    "echo_bus.bus",
    "echo_bus.group.consumer",
    "echo_memory",
    "echo_embedded",
    "echo_ops.topic_admin",
    "echo_ops.cli.doctor",
    "echo_ops.cli.run",
    "echo_ops.cli.demo",
    "echo_ops.cli.up",
    "echo_tasks.catalogue",
    "echo_tasks.countdown",
    "echo_tasks.knights_knaves",
    "echo_tasks.mathematics",
    "echo_tasks.reasoning",
    "echo_rollout.run",
    "echo_rollout.worker",
    "echo_rollout.engines.catalogue",
    "echo_streams.run",
    "echo_learner.losses.config",
    "echo_learner.training.microbatches",
    "echo_replay.audit",
    "echo_replay.export.manifest",
    "echo_ops.cli.export",
    "echo_ops.cli.sql",
    "echo_ops.cli.dlq",
    "echo_ops.cli.runs",
]


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_nothing_but_the_adapters_loads_a_heavy_library() -> None:
    assert not loaded_by(", ".join(LIGHT)) & (HEAVY | {"jgo"})


def test_help_loads_no_client_at_all() -> None:
    code = "import sys, echo_ops.cli\nsys.argv[1:] = ['--help']\ntry: echo_ops.cli.main()\nfinally: print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "checkpoints" in said
    loaded = {name.partition(".")[0] for name in said.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & (HEAVY | {"jgo", "confluent_kafka", "fastavro", "numpy", "pydantic", "yaml"})


def test_a_command_that_reads_the_log_reads_no_file_of_roles_or_topics() -> None:
    code = (
        "import sys, gc\nfrom echo_ops.cli.main import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['show', '--help']).exit_code == 0\n"
        "from echo_runtime.opening import open_bus\nfrom echo_settings import Settings\n"
        "open_bus(Settings(kafka={'bootstrap': '127.0.0.1:1'}), 'operator')\n"
        "print(gc.get_freeze_count(), gc.isenabled(), *sys.modules)"
    )
    frozen, is_enabled, *loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(frozen) > 0, "the collector went through what the command imports, again and again"
    assert is_enabled == "True"
    assert "echo_ops.cli.show" in loaded
    assert "yaml" not in loaded
