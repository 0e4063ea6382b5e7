"""Nothing that comes from a topic is ever run: no product module can unpickle or evaluate it, and pickles put in every place stay bytes."""

from __future__ import annotations

import ast
import copy
import io
import logging
import pickle
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import fastavro
import pytest

from echo_bus.blobs.files import partial_of
from echo_bus.errors import TransportError
from echo_bus.reading.decoding import Decoder
from echo_bus.wire import Wire
from echo_memory.message import MemoryMessage
from echo_rollout.weights.sources import PublishedSource
from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.headers import headers_of
from echo_schemas.schemas import newest
from echo_schemas.topics import TOPICS
from tests.examples import load_examples
from tests.fuzz import test_surfaces
from tests.fuzz.cases import Tally, _judge
from tests.fuzz.mutations import _PREFIX, NAMESPACE, NUM_PARTITIONS, RUN, _places
from tests.fuzz.readers import READERS

ROOT = Path(__file__).parents[2]
PRODUCT = ("schemas", "infra", "producers", "streams", "consumers")
# Their source is made in the same function, of names of our own fields.
MAKES_CODE = {(f"schemas/echo_schemas/{name}.py", "exec") for name in ("projection", "straight", "converters")}
_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
_BUILTINS = {"eval", "exec", "compile", "__import__"}
_CALLS = {"torch.load", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "pandas.read_pickle", "pd.read_pickle"}
# Of torch.distributed: they travel as pickles.
_OBJECTS = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list"}
_KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}


def dangers(source: str) -> Iterator[str]:
    """What in `source` could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in _MODULES)
        elif isinstance(node, ast.ImportFrom):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from named & _CALLS
            if (node.module or "").partition(".")[0] in _MODULES:
                yield str(node.module)
        elif isinstance(node, ast.Constant) and node.value == "pickle":
            yield "the serializer 'pickle'"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {(keyword.arg, keyword.value.value) for keyword in node.keywords if isinstance(keyword.value, ast.Constant)}
            if name in _BUILTINS | _CALLS or name.rpartition(".")[2] in _OBJECTS:
                yield name
            if name.endswith(("np.load", "numpy.load")) and ("allow_pickle", False) not in keywords:
                yield f"{name} without allow_pickle=False"
            yield from (f"{name}({keyword}={value!r})" for keyword, value in keywords & _KEYWORDS)


@pytest.mark.slow
def test_no_product_module_can_run_what_it_reads() -> None:
    found = {
        (str(path.relative_to(ROOT)), danger)
        for folder in PRODUCT
        for path in (ROOT / folder).rglob("*.py")
        for danger in dangers(path.read_text(encoding="utf-8"))
    }
    assert found == MAKES_CODE


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from cloudpickle import loads", "from torch import load", "torch.load(f)", "torch.load(f, weights_only=False)",
        "eval(text)", "exec(text)", "np.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(f)", "app.topic(value_serializer='pickle')",
        "torch.distributed.broadcast_object_list(x)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_each_danger_is_found(source: str) -> None:
    assert list(dangers(source))


class Bomb:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


@pytest.fixture
def crater(tmp_path: Path) -> Path:
    """The file that a bomb makes: shown to be made, and gone again."""
    crater = tmp_path / "crater"
    pickle.loads(pickle.dumps(Bomb(crater))).close()
    crater.unlink()
    return crater


def bombed(plain: dict[str, Any], text: str, data: bytes) -> Iterator[dict[str, Any]]:
    """Copies of a record, in each of which another text or bytes is the bomb."""
    for number, (holder, at) in enumerate(_places(plain)):
        if isinstance(holder[at], str | bytes):
            changed = copy.deepcopy(plain)
            place, key = list(_places(changed))[number]
            place[key] = text if isinstance(holder[at], str) else data
            yield changed


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_a_pickle_in_any_place_of_a_record_is_never_run(topic: Any, crater: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    codec = lock_file_codec()
    # The oldest protocol is text, and so a good string.
    text, data = pickle.dumps(Bomb(crater), 0).decode("ascii"), pickle.dumps(Bomb(crater))
    decoder = Decoder(Wire(namespace=NAMESPACE, role="fuzz", codec=codec, run_id=RUN), TOPICS)
    decoder.set_num_partitions(dict.fromkeys(decoder.topics_with_placement, NUM_PARTITIONS))
    readers, tally = [make(codec) for make in READERS.get(topic.name, ())], Tally(topic.name)
    physical, num_tried = NAMESPACE.topic(topic), 0
    for record in load_examples(topic).values():
        schema, key = newest(type(record).SCHEMA), (topic.key_of(record) or "").encode()
        prefix, headers = _PREFIX.pack(0, codec.ids.id_of(schema)), headers_of(record, source="stranger", time_ms=5)
        values = [data, text.encode(), prefix + data]
        for changed in bombed(converter_of(type(record)).to_plain(record), text, data):
            buffer = io.BytesIO(prefix)
            buffer.seek(0, io.SEEK_END)
            with suppress(ValueError, TypeError):  # of enumerations: no writer can say it
                fastavro.schemaless_writer(buffer, schema.parsed, changed)
                values.append(buffer.getvalue())
        named = [(name, data) for name, _ in headers]
        honest = codec.encode(record)
        messages = [(key, value, headers) for value in values] + [(data, honest, headers), (key, honest, named)]
        for number, (name, value, pairs) in enumerate(messages):
            _judge(MemoryMessage(physical, number % NUM_PARTITIONS, number, name, value, pairs, 5), decoder, readers, tally)
            num_tried += 1
    assert num_tried > 5
    assert not crater.exists()


def test_pickles_among_the_weights_stay_bytes(crater: Path, tmp_path: Path) -> None:
    """A snapshot of pickles is fetched as what it is; one that became a pickle on its way is not fetched at all."""
    safetensors = pytest.importorskip("safetensors", reason="install the extra 'learner'")
    data = pickle.dumps(Bomb(crater)) * 9
    bus, manifest = test_surfaces.make_snapshot({"adapter_model.safetensors": data})
    with closing(bus.blob_reader()) as reader:
        source = PublishedSource(reader)
        source.fetch(manifest, tmp_path / "v1")
        assert (tmp_path / "v1" / "adapter_model.safetensors").read_bytes() == data
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(tmp_path / "v1" / "adapter_model.safetensors", "numpy")
        other, broken = test_surfaces.make_snapshot({"adapter_model.safetensors": bytes(len(data))}, arrives=data)
        with closing(other.blob_reader()) as bad, pytest.raises(TransportError):
            PublishedSource(bad).fetch(broken, tmp_path / "v2")
    assert not (tmp_path / "v2").exists()
    assert not partial_of(tmp_path / "v2").exists()
    assert not crater.exists()
