"""Attached rewards on the screen, in the lines and in the report."""

from __future__ import annotations

from dataclasses import replace

from echo_ops.report.page import report_page
from echo_ops.report.plain import PlainLines
from echo_ops.report.summary import summarise_run
from echo_ops.rewards.watch import Behind, ScorerLine, ScorerState
from echo_schemas.records import RewardTerm
from echo_settings import Settings
from echo_settings.public import public_config
from tests.unit.ops.test_screen import text_of
from tests.unit.ops.views import learning_view

SHADOW = ScorerLine(
    name="my_rewards.py:brevity",
    application="brevity",
    state=ScorerState.SCORING,
    term=None,
    share=1.0,
    behind=Behind(num=12, seconds=3.0, versions=1),
    mean=0.125,
    num_scored=400,
    num_failed=3,
    num_stale=0,
    error="KeyError: 'answer'",
)
WEIGHTED = replace(SHADOW, term=RewardTerm(name=SHADOW.name, weight=0.2, deadline_s=20.0))


def test_the_screen_says_who_scores_and_what_groups_do_without_it() -> None:
    view = learning_view(30)
    view.scorers = [SHADOW]
    shown = text_of(view, width=240)
    assert "brevity shadow 0.125  scoring, 3 s behind, 3 failed" in shown
    view.scorers = [replace(WEIGHTED, state=ScorerState.GONE)]
    assert "brevity 0.2 0.125  no process: groups wait 20 s" in text_of(view, width=240)
    view.scorers = [replace(SHADOW, state=ScorerState.DETACHED)]
    assert "brevity" not in text_of(view, width=240)


def test_a_line_says_what_changed_of_a_reward_and_not_that_it_is_behind() -> None:
    view, lines = learning_view(1), PlainLines()
    list(lines.news(view))
    view.scorers = [SHADOW]
    assert [line.strip() for line in lines.news(view)] == [
        "reward my_rewards.py:brevity (brevity): scoring, a shadow, no group waits, mean 0.125"
    ]
    view.scorers = [replace(SHADOW, state=ScorerState.CATCHING_UP)]
    assert list(lines.news(view)) == []
    view.scorers = [replace(WEIGHTED, state=ScorerState.GONE)]
    (line,) = lines.news(view)
    assert line.strip().startswith("reward my_rewards.py:brevity (brevity): no process, weight 0.2, groups wait 20 s, then")


def test_the_report_has_a_row_a_reward_also_of_one_that_was_detached() -> None:
    view = learning_view(30)
    view.scorers = [replace(SHADOW, state=ScorerState.DETACHED)]
    summary = summarise_run(view, wall_s=30.0, outcome="finished", software={})
    page = report_page(view, summary, public_config(Settings()), [], 0)
    assert "<td>my_rewards.py:brevity</td><td>brevity</td><td>0</td><td>detached</td>" in page
    assert "<h2>Rewards</h2>" in page
    view.scorers = []
    assert "<h2>Rewards</h2>" not in report_page(
        view, summarise_run(view, wall_s=30.0, outcome="finished", software={}), public_config(Settings()), [], 0
    )
