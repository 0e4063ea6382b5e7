"""`echoswarm up` with roles that only write records: argv is the folder, the script of the roles, and options of `up`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo_ops.cli import up
from echo_ops.cli.context import config_file
from echo_ops.cli.output import user_errors
from echo_ops.supervisor import plan
from echo_ops.supervisor.plan import ChildPlan

ROLE = Path(__file__).with_name("fake_role.py")


def main(folder: Path, behaviour: str) -> None:
    def fake_children(*args: Any, **kwargs: Any) -> Sequence[ChildPlan]:
        return tuple(
            replace(child, command=(sys.executable, str(ROLE), child.role.value, child.name, behaviour, str(folder), str(child.announce)))
            for child in plan.plan_children(*args, **kwargs)
        )

    vars(up)["plan_children"] = fake_children
    with user_errors():
        options = up.Options(plain=True, steps=12, summary=folder / "summary.json", report=folder / "report.html", agreement=1e-4)
        up.execute(config_file(None), options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
