"""The viewer's HTTP: what it serves, whom it refuses, and that what a policy wrote stays text."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.clock import Deadline
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source
from echo_replay.history import History
from echo_schemas.records import Trajectory
from tests.thorough import examples
from tests.unit.learner.pipeline import GROUP_SIZE, Pipeline
from tests.unit.replay.browser import find_browser, opened
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun, only

WAIT_S = 10.0
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>\x1b[2J"
STATIC = resources.files("echo_ops.viewer").joinpath("static")


@contextmanager
def served(pipeline: Pipeline) -> Iterator[ViewerServer]:
    with Source(pipeline.bus, History(pipeline.bus, "demo")) as source, ViewerServer(source) as server:
        yield server


@pytest.fixture(scope="module")
def viewer(sound: SoundRun) -> Iterator[ViewerServer]:
    with served(sound.pipeline) as server:
        yield server


def get(server: ViewerServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.address[1], timeout=WAIT_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        body = response.read()
        kind = response.headers["Content-Type"]
        return response.status, json.loads(body) if kind == "application/json" and body else body, dict(response.headers)
    finally:
        connection.close()


def test_every_page_is_served_and_leads_to_the_next(viewer: ViewerServer) -> None:
    assert get(viewer, "/api/overview")[1]["version"] == STEPS_TRAINED
    version = get(viewer, "/api/metrics?points=3")[1]["versions"][-1]
    seq = get(viewer, f"/api/step/{version}?limit=1")[1]["groups"][0]["seq"]
    member = get(viewer, f"/api/group/{seq}?limit=1")[1]["samples"][0]
    status, page, _ = get(viewer, f"/api/trajectory/{member['partition']}:{member['offset']}?limit=1")
    assert status == 200
    assert page["group"] == str(seq)
    assert len(page["tokens"]["ids"]) == 1
    assert get(viewer, "/api/steps?limit=1")[1]["window"]["total"] == STEPS_TRAINED
    assert get(viewer, "/api/dropped")[1]["num_dropped"] > 0


_WORDS = (
    "overview",
    "metrics",
    "steps",
    "step",
    "group",
    "trajectory",
    "dropped",
    "timeline",
    "pool",
    "rewards",
    "lineage",
    "search",
    "sql",
)
_NAMES = (
    "offset",
    "limit",
    "name",
    "run",
    "first",
    "last",
    "points",
    "sort",
    "version",
    "step",
    "since",
    "until",
    "seconds",
    "a",
    "question",
)
_ANY = st.sampled_from(("", "0", "1", "-1", "9" * 30, "1..2", "now", "2026-13-40", "\0", "%", "*", "[", "NaN")) | st.text(max_size=6)


@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.tuples(st.sampled_from(_WORDS), st.lists(_ANY, max_size=2)),
    query=st.lists(st.tuples(st.sampled_from(_NAMES) | _ANY, _ANY), max_size=4),
    headers=st.dictionaries(
        st.sampled_from(("Origin", "Sec-Fetch-Site", "Accept")), st.sampled_from(("", "null", "none", "x")), max_size=2
    ),
)
def test_whatever_a_browser_asks_is_answered_or_refused(
    viewer: ViewerServer, path: tuple[str, list[str]], query: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    address = "/api/" + "/".join(quote(part, safe=":") for part in (path[0], *path[1])) + "?" + urlencode(query)
    status, page, _ = get(viewer, address, **headers)
    assert status in {200, 400, 403, 404, 503}, page


def test_a_search_is_handed_out_as_it_finds(viewer: ViewerServer) -> None:
    page = get(viewer, "/api/search?fate=trained&limit=500")[1]
    deadline = Deadline.after(WAIT_S)
    while not page["is_done"]:
        assert not deadline.expired(), "waited for the end of a search"
        page = get(viewer, f"/api/search/{page['search']}?limit=500")[1]
    assert page["window"]["total"] == page["num_looked_at"] > STEPS_TRAINED * GROUP_SIZE
    part = get(viewer, f"/api/search/{page['search']}?offset=2&limit=1")[1]
    assert part["hits"] == page["hits"][2:3]
    assert get(viewer, "/api/search/0123456789abcdef")[0] == 404


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/nothing", 404, "no page"),
        ("/../../etc/passwd", 404, "no page"),
        ("/api/step/90", 404, "no report of step 90"),
        ("/api/group/900", 404, "no group 900"),
        ("/api/trajectory/0:99999", 404, "no offset 99999"),
        ("/api/step/1?limit=x", 400, "no whole number"),
        ("/api/step/1?sort=x", 400, "none of spread"),
        ("/api/step/1?bogus=1", 400, "no parameter of this page"),
        ("/api/search?pattern=((", 400, "is broken"),
        ("/api/search?pattern=a{99999999999}", 400, "is broken"),
        ("/api/search?pattern=a&tokens=1", 400, "not for both"),
        ("/api/search?step=1&version=2", 400, "two ranges"),
        (f"/api/search?pattern={'a' * 600}", 400, "at most 500"),
        (f"/{'a' * 5_000}", 414, "at most 4000"),
        ("/?" + "&".join(f"a{at}=1" for at in range(99)), 400, "at most 40"),
    ],
)
def test_a_mistake_is_a_clear_sentence(viewer: ViewerServer, path: str, status: int, says: str) -> None:
    found, body, _ = get(viewer, path)
    assert found == status
    assert says in body["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_it_only_shows(viewer: ViewerServer, method: str) -> None:
    assert get(viewer, "/api/overview", method=method)[0] == 405


def test_pages_of_others_are_refused(viewer: ViewerServer) -> None:
    own = f"127.0.0.1:{viewer.address[1]}"
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{viewer.address[1]}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    ):
        assert get(viewer, "/api/search?pattern=a", **headers)[0] == 403
    assert get(viewer, "/api/overview", Host=own, Origin=f"http://{own}", Sec_Fetch_Site="same-origin")[0] == 200
    assert get(viewer, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200, "a link to the viewer may be followed"


def test_no_script_runs_but_its_own_files(viewer: ViewerServer) -> None:
    for path in ("/", "/app.js", "/style.css", "/api/overview"):
        _, _, headers = get(viewer, path)
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
    page = STATIC.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", page), "the page has a script or a style of its own"
    for file in STATIC.iterdir():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www\.w3\.org)", file.read_text()
        ), file


def test_what_a_policy_wrote_travels_as_json_alone(sound: SoundRun, tmp_path: Path) -> None:
    with served(sound.forge(tmp_path, only(Trajectory, lambda record: [replace(record, completion=HOSTILE)]))) as server:
        status, body, headers = get(server, "/api/group/1")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert body["samples"][0]["answer"]["text"] == HOSTILE.replace("\x1b", "␛")


@pytest.mark.parametrize("name", sorted(file.name for file in STATIC.iterdir() if file.name.endswith(".js")))
def test_the_scripts_parse(name: str, tmp_path: Path) -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("no node on this machine to parse JavaScript with")
    module = tmp_path / f"{name.removesuffix('.js')}.mjs"
    module.write_text(STATIC.joinpath(name).read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([node, "--check", str(module)], check=True, timeout=WAIT_S)


@pytest.mark.slow
def test_in_a_browser_four_steps_lead_from_the_curve_to_the_token_and_a_hostile_text_is_a_text(sound: SoundRun, tmp_path: Path) -> None:
    if (browser := find_browser()) is None:
        pytest.skip("no Chromium on this machine; ECHO_CHROMIUM names one")
    copy = sound.forge(tmp_path / "run", only(Trajectory, lambda record: [replace(record, completion=HOSTILE)]))
    with served(copy) as server, opened(browser, tmp_path / "profile") as page:
        page.open(server.url)
        page.wait_for("document.querySelector('svg.curve') !== null")
        page.evaluate("document.querySelector('svg.curve').dispatchEvent(new MouseEvent('click', {clientX: 9000}))")
        page.wait_for(f"document.title.startsWith('Step {STEPS_TRAINED} ')")
        page.evaluate("document.querySelector('main td a').click()")
        page.wait_for("document.title.startsWith('Group ')")
        assert HOSTILE.replace("\x1b", "␛") in page.evaluate("document.querySelector('.samples pre').textContent")
        page.press("Enter")
        page.wait_for("document.querySelectorAll('.turn .token').length > 0")
        assert page.evaluate("document.title").startswith("Trajectory ")
        here = page.evaluate("location.hash")
        page.wait_for("document.querySelector('.way').textContent.includes('next')")
        page.press("ArrowRight")
        page.wait_for(f"location.hash !== {json.dumps(here)}")
        page.wait_for("document.title.startsWith('Trajectory ') && document.querySelector('.way').textContent.includes('previous')")
        assert page.evaluate("document.querySelectorAll('main img, main script').length") == 0
