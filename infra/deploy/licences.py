"""`python infra/deploy/licences.py`: docs/licences.md, every package of constraints.txt with its licence, as its own metadata say.

Run it in an environment that has them all (`make licences`). Exits 1 where a package has no licence in its metadata and none below.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "licences.md"
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;]+)", re.MULTILINE)
_CLASSIFIER = "License :: "
# A text, not a name.
_MOST_CHARACTERS = 60
# Packages whose metadata name none: as the licence file in them says.
_KNOWN = {
    "cuda-toolkit": "NVIDIA proprietary (a meta package: it installs nothing here)",
    "oss-harmony": "Apache-2.0",
    "setuptools": "MIT",
    "tiktoken": "MIT",
    "torchcodec": "BSD-3-Clause",
    "zss": "BSD-3-Clause",
}
_HEAD = """# Licences

Every package that `make setup` installs (constraints.txt), with the licence that its own metadata name. EchoSwarm itself is
Apache-2.0. `make licences` writes this page; a test compares it with constraints.txt. `make sbom` writes the same packages,
as they are installed, as a CycloneDX document; `make pip-audit` asks for their known vulnerabilities. The embedded broker's and
registry's jars are in `kafka.lock` and `registry.lock` with their checksums; nearly all are Apache-2.0.

| package | version | licence |
|---|---|---|
"""


def pinned(constraints: str) -> dict[str, str]:
    """Package → version, as constraints.txt has them."""
    return {match["name"]: match["version"] for match in _PINNED.finditer(constraints)}


def licence_of(package: str) -> str:
    """One line. Raises LookupError where nobody says."""
    try:
        found = _named(metadata(package))
    except PackageNotFoundError:
        found = ""
    if not (found := _KNOWN.get(package, found)):
        raise LookupError(package)
    return found


def _named(about: PackageMetadata) -> str:
    classifiers = [name.rpartition(" :: ")[2] for name in about.get_all("Classifier") or () if name.startswith(_CLASSIFIER)]
    classifiers = [name for name in classifiers if name != "OSI Approved"]
    said = {name: str(about[name]).strip() for name in ("License", "License-Expression") if name in about}
    text = said.get("License", "")
    is_name = text and "\n" not in text and len(text) <= _MOST_CHARACTERS and text.upper() != "UNKNOWN"
    return said.get("License-Expression") or (text if is_name else "") or ", ".join(classifiers)


def main() -> int:
    """Write the page."""
    rows, unknown = [], []
    for package, version in sorted(pinned((ROOT / "constraints.txt").read_text(encoding="utf-8")).items()):
        try:
            rows.append(f"| {package} | {version} | {licence_of(package).replace('|', '/')} |\n")
        except LookupError:
            unknown.append(package)
    if unknown:
        sys.stderr.write(f"No licence is known of {', '.join(unknown)}: install them, or write them into _KNOWN.\n")
        return 1
    PAGE.write_text(_HEAD + "".join(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
