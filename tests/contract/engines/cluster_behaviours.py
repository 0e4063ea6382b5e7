"""What of the contract is tried against a cluster that computes with a real model: the others need none."""

from __future__ import annotations

from tests.contract.engines import contract
from tests.thorough import IS_THOROUGH

_EACH_TIME: tuple[contract.Behaviour, ...] = (contract.generations_carry_version_and_sha, contract.logprobs_equal_a_plain_forward)
BEHAVIOURS = (
    _EACH_TIME
    if not IS_THOROUGH
    else (
        *_EACH_TIME,
        contract.nothing_before_the_first_version,
        contract.a_version_arrives_while_generations_run,
        contract.truncated_sampling_says_what_it_drew_from,
        contract.a_seed_repeats_a_group_of_different_members,
        contract.stop_texts_cut_the_text_and_keep_the_tokens,
        contract.close_fails_what_runs_and_may_be_repeated,
    )
)
