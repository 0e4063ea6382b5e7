"""Which specification an order makes of the one in force, and which orders are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_ops.cli.reward import RunNow, of_attached, refuse_sampled, refuse_unscored
from echo_ops.rewards.watch import RecentRewards
from echo_ops.rewards.weights import Missing, full_name, parse_missing, parse_weight, policy_of, terms_in_force, with_weight
from echo_schemas.errors import UserError
from echo_schemas.records import Control, RewardAttachment, RewardControl, RewardTerm
from tests.unit.core.records import at
from tests.unit.ops.reward_records import failed, scored

EXACT = RewardTerm(name="exact", weight=1.0, deadline_s=300.0)
BREVITY = "my_rewards.py:brevity"


def test_another_weight_leaves_the_other_terms_as_they_are() -> None:
    terms = with_weight((EXACT,), BREVITY, 0.2, None, 300.0)
    assert terms == (EXACT, RewardTerm(name=BREVITY, weight=0.2, deadline_s=300.0))
    assert with_weight(terms, BREVITY, 0.0, None, 300.0) == (EXACT, RewardTerm(name=BREVITY, weight=0.0, deadline_s=300.0))


def test_what_groups_do_is_kept_until_it_is_said_anew() -> None:
    patient = with_weight((EXACT,), BREVITY, 0.2, Missing(required=False), 300.0)
    again = with_weight(patient, BREVITY, 0.5, None, 300.0)
    assert again[1] == replace(patient[1], weight=0.5)
    assert not again[1].is_awaited
    assert with_weight(again, BREVITY, 0.5, Missing(default=0.0, deadline_s=9.0), 300.0)[1].default == 0.0


def test_nothing_left_to_train_on_is_refused() -> None:
    with pytest.raises(UserError, match="every weight would be 0"):
        with_weight((EXACT,), "exact", 0.0, None, 300.0)


@pytest.mark.parametrize(("from_version", "in_force"), [(3, True), (8, True), (9, False)])
def test_an_order_is_in_force_from_its_version_on(from_version: int, in_force: bool) -> None:
    order = RewardControl(from_version=from_version, terms=(replace(EXACT, weight=2.0),))
    assert terms_in_force((EXACT,), order, 7) == (order.terms if in_force else (EXACT,))
    assert terms_in_force((EXACT,), None, 7) == (EXACT,)


@pytest.mark.parametrize("asked", ["brevity", BREVITY])
def test_a_reward_is_named_whole_or_by_its_function(asked: str) -> None:
    assert full_name(asked, {BREVITY, "exact"}) == BREVITY


def test_a_name_that_fits_two_or_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"'brevity' may be a\.py:brevity, b\.py:brevity"):
        full_name("brevity", {"a.py:brevity", "b.py:brevity"})
    with pytest.raises(UserError, match=r"No application scores 'brevty'.*Known: exact"):
        full_name("brevty", {"exact"})


@pytest.mark.parametrize("text", ["brevity", "=1", "brevity=", "brevity=much", "brevity=nan", "brevity=inf"])
def test_what_is_no_weight_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_weight(text)
    assert parse_weight("my_rewards.py:brevity=-0.5") == (BREVITY, -0.5)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("wait", "groups wait 9 s, then their samples are dropped"),
        ("without", "groups go without it"),
        ("0", "groups wait 9 s, then 0 stands in"),
    ],
)
def test_what_groups_do_is_said(text: str, policy: str) -> None:
    (_, term) = with_weight((EXACT,), BREVITY, 0.2, parse_missing(text, 9.0), 300.0)
    assert policy_of(term) == policy
    assert policy_of(replace(term, weight=0.0)) == "no group waits"


def test_a_reward_that_nobody_gives_now_would_starve_the_run() -> None:
    heard = {("main", "exact"): RecentRewards(), ("brevity", BREVITY): RecentRewards()}
    heard["main", "exact"].add(scored("exact", at(1), time_ms=500_000))
    heard["brevity", BREVITY].add(failed(BREVITY, at(1), "KeyError: 'answer'"))
    with pytest.raises(UserError, match=r"No application gives.*KeyError: 'answer'"):
        refuse_unscored(BREVITY, heard)
    heard["brevity", BREVITY].add(scored(BREVITY, at(2), time_ms=400_000))
    with pytest.raises(UserError, match="groups would wait"):
        refuse_unscored(BREVITY, heard)
    heard["brevity", BREVITY].add(scored(BREVITY, at(3), time_ms=499_000))
    refuse_unscored(BREVITY, heard)


def test_nothing_is_expected_of_an_application_that_was_detached() -> None:
    heard = {("main", "exact"): RecentRewards(), ("brevity", BREVITY): RecentRewards()}
    for is_attached, left in ((True, heard), (False, {("main", "exact"): heard["main", "exact"]})):
        attachment = RewardAttachment(application="brevity", is_attached=is_attached, rewards=(BREVITY,), share=1.0)
        order = Control(run_id="demo", epoch=1, attachment=attachment, issued_by="test", time_ms=1)
        assert of_attached(heard, RunNow(version=7, terms=(EXACT,), orders={"demo/reward/brevity": order})) == left


def test_groups_that_are_not_sampled_would_wait_in_vain() -> None:
    attachment = RewardAttachment(application="brevity", is_attached=True, rewards=(BREVITY,), share=0.1)
    order = Control(run_id="demo", epoch=1, attachment=attachment, issued_by="test", time_ms=1)
    now = RunNow(version=7, terms=(EXACT,), orders={"demo/reward/brevity": order})
    for policy in (None, parse_missing("wait", 9.0)):
        with pytest.raises(UserError, match="10% of the groups only"):
            refuse_sampled(BREVITY, now, policy)
    refuse_sampled(BREVITY, now, parse_missing("without", 9.0))
    refuse_sampled("exact", now, None)
