"""The judge against a small server on loopback: scores, costs, cache, turns, and what it does when it is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx", reason="install the extra 'streams'")

from echo_replay.rescoring.inside import Answer, ScoringTask
from echo_replay.rescoring.order import RescoreOrder
from echo_replay.rescoring.team import Item, Team
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import UserError
from echo_settings import Settings
from echo_streams.intake import Identity
from echo_tasks.catalogue import load_reward
from echo_tasks.judge import JudgeFailed, JudgeOptions, LlmJudge, llm_judge
from echo_tasks.rewards import RewardResult, sample_of
from tests.unit.core.records import at, trajectory

ORDER = RescoreOrder(run_id="demo", name="judge", code_version="1")
Reply = tuple[int, dict[str, str], Any]
Answers = Callable[[dict[str, Any]], Reply]


def said(score: object, *, tokens: tuple[int, int] = (1000, 100)) -> Reply:
    """A chat completion with a score."""
    text = json.dumps({"score": score, "why": "so"})
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1]}
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


@contextmanager
def serving(answers: Answers) -> Iterator[tuple[str, list[tuple[dict[str, Any], str]]]]:
    """An endpoint, and what it was asked: the body, the key."""
    asked: list[tuple[dict[str, Any], str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            asked.append((body, self.headers.get("Authorization", "")))
            status, headers, content = answers(body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judged(url: str, *completions: str, waits: list[float] | None = None, **options: Any) -> list[RewardResult | BaseException]:
    """What a judge says of answers that are asked about at once. `waits` takes the seconds that it would have slept."""

    async def sleep(seconds: float) -> None:
        if waits is None:
            await asyncio.sleep(seconds)
        else:
            waits.append(seconds)

    async def ask() -> list[RewardResult | BaseException]:
        given = {"url": url, "model": "m", "instructions": "Is it kind?", "cache": None, **options}
        judge = LlmJudge(JudgeOptions(**given), sleep=sleep)
        try:
            samples = [sample_of(trajectory(0, completion=each, entry='{"answer": "42"}')) for each in completions]
            return await asyncio.gather(*(judge.score(sample) for sample in samples), return_exceptions=True)
        finally:
            await judge.close()

    return asyncio.run(ask())


def test_a_score_with_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with serving(lambda _: said(7)) as (url, asked):
        (found,) = judged(url, "yes", price_in=2.0, price_out=10.0, key_variable="MY_KEY", with_reference=True)
    assert found == RewardResult(value=0.7, components={"cost_usd": 0.003, "cached": 0.0})
    ((body, key),) = asked
    assert key == "Bearer secret"
    assert body["temperature"] == 0.0
    assert body["messages"][0]["content"].startswith("Is it kind?")
    assert "<answer>\nyes\n</answer>\n<reference>\n42\n</reference>" in body["messages"][1]["content"]


def test_the_same_question_is_asked_and_paid_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"cache": tmp_path / "cache.sqlite", "price_in": 1.0}
    with serving(lambda _: said(10)) as (url, asked):
        first = judged(url, "a", "a", "b", **options)
        again = judged(url, "a", "b", **options)
    assert len(asked) == 2
    assert all(isinstance(each, RewardResult) and each.value == 1.0 for each in first + again)
    assert sum(each.components["cost_usd"] for each in first if isinstance(each, RewardResult)) == pytest.approx(0.002)
    assert all(isinstance(each, RewardResult) and each.components == {"cost_usd": 0.0, "cached": 1.0} for each in again)


def test_what_another_attempt_may_mend_is_tried_again_with_longer_waits() -> None:
    replies = iter([(429, {"Retry-After": "7"}, b"slow down"), (503, {}, b"busy"), said(5)])
    waits: list[float] = []
    with serving(lambda _: next(replies)) as (url, asked):
        (found,) = judged(url, "a", waits=waits)
    assert isinstance(found, RewardResult)
    assert found.value == 0.5
    assert len(asked) == 3
    assert waits[0] == 7.0
    assert 0.5 <= waits[1] <= 1.0


def test_what_no_attempt_mends_is_said_at_once_and_the_rest_in_the_end() -> None:
    with serving(lambda _: (401, {}, b"no such key")) as (url, asked):
        (found,) = judged(url, "a")
    assert len(asked) == 1
    assert isinstance(found, JudgeFailed)
    assert "refused the question (401: no such key)" in str(found)
    waits: list[float] = []
    (gone,) = judged(url, "a", retries=2, waits=waits)
    assert isinstance(gone, JudgeFailed)
    assert "did not answer, 3 attempts (ConnectError" in str(gone)
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (said(11), "gave 11 on a scale from 0 to 10"),
        (said("high"), "gave no score"),
        ((200, {}, b"<html>"), "is no chat completion"),
        ((200, {}, {"choices": []}), "is no chat completion"),
    ],
)
def test_an_answer_that_is_no_score_is_a_failure_and_not_kept(reply: Reply, why: str, tmp_path: Path) -> None:
    with serving(lambda _: reply) as (url, asked):
        for _ in range(2):
            (found,) = judged(url, "a", cache=tmp_path / "cache.sqlite")
            assert isinstance(found, JudgeFailed)
            assert why in str(found)
    assert len(asked) == 2


def test_no_more_questions_a_minute_than_allowed() -> None:
    waits: list[float] = []
    with serving(lambda _: said(1)) as (url, _):
        found = judged(url, *"abcd", per_minute=60, waits=waits)
    assert all(isinstance(each, RewardResult) for each in found)
    assert [round(each) for each in waits] == [1, 2, 3]


def test_options_that_are_none_are_named() -> None:
    with pytest.raises(UserError, match="is no address"):
        llm_judge(url="localhost", model="m", instructions="x")
    with pytest.raises(UserError, match="unexpected keyword argument 'prices'"):
        llm_judge(url="http://h", model="m", instructions="x", prices=1)
    with pytest.raises(UserError, match="scale goes from 1 to 1"):
        llm_judge(url="http://h", model="m", instructions="x", scale=(1, 1))
    one, other = (llm_judge(url="http://h", model="m", instructions=text) for text in ("x", "y"))
    assert one.version != other.version


def test_the_past_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = [trajectory(number, completion=str(number)) for number in range(20)]
    encode = lock_file_codec().encode
    items = [Item(where=at(each.seq), identity=Identity.of(each), value=encode(each), compared=0.0) for each in samples]
    with serving(lambda body: said(int(body["messages"][1]["content"].split("<answer>\n")[1].split("\n")[0]) % 10)) as (url, _):
        Path("my_rewards.py").write_text(
            f"from echo_tasks.judge import llm_judge\njudge = llm_judge(url={url!r}, model='m', instructions='Is it kind?', price_in=1.0)\n"
        )
        path = "my_rewards.py:judge"
        task = ScoringTask(path=path, order=ORDER, settings=Settings())
        answers: dict[int, Answer] = {}
        with Team(task, load_reward(path), 1) as team:
            for judged_ones in team.judge(iter([items])):
                answers |= {item.where.offset: answer for item, answer in judged_ones}
    assert {offset: answer.value for offset, answer in answers.items()} == {number: number % 10 / 10 for number in range(20)}
    assert sum(answer.cost_usd for answer in answers.values()) == pytest.approx(0.02)
