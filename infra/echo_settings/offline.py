"""[offline]: training on episodes that were logged elsewhere, in place of a feeder's requests."""

from __future__ import annotations

from pydantic import Field

from echo_settings.section import Section


class OfflineSettings(Section):
    """[offline]: training on episodes that were logged elsewhere (docs/offline.md)."""

    episodes: str = ""
    """A JSON Lines file of episodes; `echoswarm up` then starts the offline producer in place of the feeder. Empty: a live run."""
    epochs: int = Field(default=1, ge=0)
    """How often each group of the file is trained; 0: for as long as the run goes on."""
    first_seq: int = Field(default=0, ge=0)
    """The seq of the file's first group: 0, or where a run that has trained on other data stands."""
    plain: bool = False
    """Join the contents as they are, without a chat template: for a model that has none."""
