"""Settings: where values come from, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_schemas.errors import UserError
from echo_settings import load_settings
from echo_settings.public import HIDDEN, public_config


def load(tmp_path: Path, text: str, **environ: str) -> object:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environ)


def test_without_a_file_the_defaults_hold() -> None:
    settings = load_settings(None, {})
    assert (settings.kafka.bootstrap, settings.kafka.namespace) == ("embedded", "echo.demo")
    assert (settings.budget, settings.publication_period) == (3, 2)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    settings = load_settings_of(
        tmp_path, '[kafka]\nbootstrap = "file:1"', ECHO_KAFKA__BOOTSTRAP="env:2", ECHO_LEARNER__STEPS="7", OTHER="x"
    )
    assert (settings.kafka.bootstrap, settings.learner.steps) == ("env:2", 7)


def load_settings_of(tmp_path: Path, text: str, **environ: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environ)


def test_client_properties_come_from_file_and_environment(tmp_path: Path) -> None:
    settings = load_settings_of(
        tmp_path,
        '[kafka.client]\n"security.protocol" = "SASL_SSL"',
        ECHO_KAFKA__CLIENT__SASL_USERNAME="u",
        ECHO_KAFKA__CLIENT__LINGER_MS="3",
    )
    assert settings.kafka.client == {"security.protocol": "SASL_SSL", "sasl.username": "u", "linger.ms": 3}


def test_secrets_come_from_files_and_show_nowhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n", encoding="utf-8")
    text = f'[kafka.client]\n"sasl.password_file" = "{secret}"\n[registry]\nuser = "u"\npassword_file = "{secret}"'
    settings = load_settings_of(tmp_path, text)
    assert settings.kafka.client["sasl.password"] == "hunter2"
    assert settings.registry.client_properties() == {"basic.auth.user.info": "u:hunter2"}
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(public_config(settings))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[kafka]\nbootstrp = 'x'", "Did you mean 'bootstrap'"),
        ("[kafak]\nbootstrap = 'x'", "no section 'kafak'"),
        ("[policy.lora]\nrank = 3", "Known here: r, alpha"),
        ("[learner]\nsteps = 'many'", r"\[learner\] steps"),
        ("[run]\nname = 'a/b'", "cannot be part of a key"),
        ("[run]\nmode = 'sometimes'", r"\[run\] mode"),
        ("[kafka]\nnamespace = '.x'", "not a legal topic prefix"),
        ("[staleness]\nbudget = 1\npublication_period = 4", "publication_period = 2 or budget = 3"),
        ("[run]\nmode = 'sequential'\n[staleness]\npublication_period = 2", "must be 1 in sequential mode"),
        ("[run]\nmode = 'sequential'\n[coordinator]\nenabled = true", "generates ahead of the learner"),
        ("[staleness]\nbudget = 0\n[coordinator]\nenabled = true", "write budget = 1 or more"),
        ("[checkpoint]\nevery = 4", "does not divide the publication period"),
        ("[staleness]\nmin_group_size = 99", "no group would ever be trained"),
        ("[learner]\ngroups_per_step = 3\nupdates_per_step = 2", "does not divide groups_per_step"),
        ("[rollout]\nmax_turn_tokens = 9", "no answer could be so long"),
        ("[learner]\nkl_estimator = 'k1'", "gradient of zero in the mean"),
        ("[learner]\nlr_schedule = 'linear'\nsteps = 30\nupdates_per_step = 4", "has no end; write decay_steps = 120"),
        ("[learner]\nlr_schedule = 'square'", r"\[learner\] lr_schedule"),
        ("[learner]\nmin_lr = 1e-5", "write lr_schedule"),
        ("[learner]\ndecay_steps = 100", "write lr_schedule"),
        ("[learner]\nlr_schedule = 'cosine'\ndecay_steps = 100\nwarmup_steps = 100", "counts the warm-up too"),
        (
            "[learner]\nlr_schedule = 'linear'\nsteps = 3\nupdates_per_step = 4\ndecay_steps = 12\nwarmup_steps = 12",
            "is not above warmup_steps = 12; write warmup_steps below 12, all updates of the run",
        ),
        ("[learner]\nlr_schedule = 'cosine'\ndecay_steps = 100\nmin_lr = 0.5", "is above lr"),
        ("[learner]\nlr_schedule = 'cosine'\ndecay_steps = 99", r"ends before the run \(100 updates\).*write decay_steps = 100"),
        ("[learner]\nlr_schedule = 'cosine'\ndecay_steps = 99\nsteps = 0", "any number of updates.*write a min_lr above 0"),
        ("[learner]\ncompile = true\n[policy]\nreplay_experts = true", "routers inside of the layers.*write compile = false"),
        ("[kafka", "not valid TOML"),
        ("[registry]\npassword_file = '/no/such/file'", "cannot be read"),
    ],
)
def test_mistakes_are_sentences_that_say_what_to_write(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(tmp_path, text)


def test_a_missing_file_and_a_strange_variable_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no configuration file"):
        load_settings(tmp_path / "absent.toml", {})
    with pytest.raises(UserError, match="not a section"):
        load(tmp_path, "[run]\nseed = 1", ECHO_RUN__SEED__X="1")


def test_a_secret_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, "[metrics]\nport = 'hunter2'")
    assert "hunter2" not in str(caught.value)


OAUTH = """
[kafka.client]
"security.protocol" = "SASL_SSL"
"sasl.oauthbearer.client.id" = "echo"
"sasl.oauthbearer.client.secret" = "hunter2"
"sasl.oauthbearer.config" = "principal=hunter2"
"sasl.oauthbearer.assertion.private.key.pem" = "hunter2"
"a.property.of.next.year" = "hunter2"
"linger.ms" = 3
[rollout]
engine = "vllm"
[rollout.options]
hf_token = "hunter2"
speculative_config = { token = "hunter2" }
url = "http://user:hunter2@host/v1"
dtype = "float32"
max_num_seqs = 8
"""


def test_what_is_published_is_a_list_of_what_may_be(tmp_path: Path) -> None:
    public = public_config(load_settings_of(tmp_path, OAUTH))
    assert "hunter2" not in str(public)
    shown = {key: value for key, value in public["kafka"]["client"].items() if value != HIDDEN}
    assert shown == {"security.protocol": "SASL_SSL", "linger.ms": 3}
    assert {key for key, value in public["rollout"]["options"].items() if value != HIDDEN} == {"dtype", "max_num_seqs"}


@pytest.mark.parametrize(
    ("text", "belongs"),
    [
        ('[registry]\nurl = "https://user:hunter2@registry:8081"', r"\[registry\] url: .*\[registry\] user and password_file"),
        ('[store]\nuri = "s3://key:hunter2@bucket/path"', r"\[store\] uri: .*AWS_ACCESS_KEY_ID"),
        ('[store]\nuri = "simplecache::s3://key:hunter2@bucket/path"', r"\[store\] uri: .*AWS_ACCESS_KEY_ID"),
        ('[store]\nuri = "abfs://container/path?sig=hunter2"', r"\[store\] uri: may hold no user, password or query"),
        ('[kafka]\nbootstrap = "one:9092,user:hunter2@two:9092"', r"\[kafka\] bootstrap: .*sasl.password_file"),
    ],
)
def test_an_address_holds_no_login_and_the_error_says_where_it_belongs(tmp_path: Path, text: str, belongs: str) -> None:
    with pytest.raises(UserError, match=belongs) as caught:
        load_settings_of(tmp_path, text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["[rewards]\nexact = nan", "[rewards]\nexact = inf", "[learner]\nlr = nan", "[staleness]\nbudget = inf"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"finite number|valid integer"):
        load_settings_of(tmp_path, text)
