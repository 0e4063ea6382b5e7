"""Other releases to meet this one: an older commit of this repository, and a next one made on the spot.

Each is a folder with the packages, to be put before the installed ones; what they depend on is the environment's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROM_VARIABLE = "ECHO_UPGRADE_FROM"
NEW_FIELD = "added_by_next"
NEW_VALUE = "said by the next release"
_DEFAULT_FROM = Path(__file__).with_name("from.txt")
_PACKAGES = ("schemas", "infra", "producers", "streams", "consumers")
_RECORD = re.compile(r'^    SCHEMA: ClassVar\[str\] = "(\w+)"\n', re.MULTILINE)
_STATE_LINE = '        "terms": [asdict(term) for term in state.terms],\n'
_SHOWN = 3_000


@dataclass(frozen=True)
class Release:
    """One state of the code. `paths` go before everything else that Python imports; none: this checkout."""

    name: str
    paths: tuple[Path, ...] = ()

    def run(self, environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS` with the code of this release. The text of a failure is for whoever asserts."""
        path = os.pathsep.join(filter(None, (*map(str, self.paths), environ.get("PYTHONPATH"))))
        return subprocess.run(
            [sys.executable, *arguments], env={**environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip

    def command(self, environ: Mapping[str, str], *arguments: str) -> str:
        """`echoswarm ARGUMENTS` of this release; what it prints. Fails if it does."""
        done = self.run({**environ, "COLUMNS": "200"}, "-m", "echo_ops.cli", *arguments)
        assert done.returncode == 0, f"{self.name}: {' '.join(arguments)}\n{done.stdout[-_SHOWN:]}\n{done.stderr[-_SHOWN:]}"
        return done.stdout

    def check(self, environ: Mapping[str, str]) -> None:
        """Fails unless processes of this release really import its packages and no others."""
        names = [file.parent.name for folder in _PACKAGES for file in (self.root / folder).glob("echo_*/__init__.py")]
        found = self.run(environ, "-c", f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)")
        files = found.stdout.splitlines()
        assert len(files) == len(names) > 0, found.stderr
        assert all(Path(file).is_relative_to(self.root) for file in files), files

    @property
    def root(self) -> Path:
        """The folder that holds the packages' folders."""
        return self.paths[0].parent if self.paths else ROOT


THIS = Release("this release")


def older_release(folder: Path) -> Release:
    """What ECHO_UPGRADE_FROM names, else the last tag before this commit, else the commit in `from.txt`. Fails if it is not here."""
    named = os.environ.get(FROM_VARIABLE) or _git("describe", "--tags", "--abbrev=0", "HEAD^") or _DEFAULT_FROM.read_text(encoding="utf-8")
    commit = _git("rev-parse", "--verify", "--quiet", f"{named.strip()}^{{commit}}")
    assert commit, f"{named.strip()!r} is no commit of this checkout: fetch the whole history, or name another one with FROM=…"
    folder.mkdir(parents=True)
    archive = folder / "release.tar"
    subprocess.run(["git", "-C", str(ROOT), "archive", "--output", str(archive), commit, *_PACKAGES], check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return Release(f"{commit[:7]}", tuple(folder / name for name in _PACKAGES))


def next_release(folder: Path) -> Release:
    """This checkout with one more field in every record, which its writers fill, and one more in every checkpoint."""
    for name in _PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    release = Release("the next release", tuple(folder / name for name in _PACKAGES))
    schemas = folder / "schemas" / "echo_schemas"
    for file in (schemas / "records").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        for record in _RECORD.findall(text):
            _add_field(schemas / "avro", record)
        file.write_text(_RECORD.sub(rf'\g<0>    {NEW_FIELD}: str = "{NEW_VALUE}"\n', text), encoding="utf-8")
    checkpoint = folder / "consumers" / "echo_learner" / "commit" / "learner_state.py"
    text = checkpoint.read_text(encoding="utf-8")
    assert text.count(_STATE_LINE) == 1, "the line that the new field of a checkpoint goes behind is not there"
    checkpoint.write_text(text.replace(_STATE_LINE, f'{_STATE_LINE}        "{NEW_FIELD}": "{NEW_VALUE}",\n'), encoding="utf-8")
    # Refuses what is not compatible.
    release.command(os.environ, "schemas", "check", "--update-lock")
    return release


def _add_field(folder: Path, record: str) -> None:
    version = len(list(folder.glob(f"{record}.v*.avsc")))
    schema = json.loads((folder / f"{record}.v{version}.avsc").read_text(encoding="utf-8"))
    schema["fields"].append({"name": NEW_FIELD, "type": "string", "default": "", "doc": "Of a release that is not there yet."})
    (folder / f"{record}.v{version + 1}.avsc").write_text(json.dumps(schema), encoding="utf-8")


def _git(*arguments: str) -> str:
    """What git prints; nothing where it refuses."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False).stdout.strip()
