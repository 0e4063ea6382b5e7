"""The product's modules on simulated threads, time and disk, for every test of this folder."""

from __future__ import annotations

import gc
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.model.scenarios import Scenario

MakeScenario = Callable[..., "Scenario"]
# In memory where there is one: what is fsynced is the model's business, not this machine's.
_SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def _simulated() -> Iterator[None]:
    pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
    import tests.model.scenarios  # noqa: F401  whatever is loaded now is simulated
    from tests.model.disk import mounted
    from tests.model.primitives import installed

    gc.collect()
    # torch's objects would be looked at again and again.
    gc.freeze()
    with installed(), mounted():
        yield
    gc.unfreeze()


@pytest.fixture
def model_folder(_simulated: None, tmp_path: Path) -> Iterator[Path]:
    """Where the disks of runs are."""
    logging.disable(logging.CRITICAL)
    folder = Path(tempfile.mkdtemp(dir=_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else tmp_path
    yield folder
    logging.disable(logging.NOTSET)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def scenario(model_folder: Path) -> MakeScenario:
    """`scenario(mode, kappa)`: the same run again and again, each time with other faults."""
    from tests.model.scenarios import Scenario

    def make(mode: str = "asynchronous", kappa: int = 1, **sections: Any) -> Scenario:
        return Scenario(model_folder, mode, kappa, **sections)

    return make
