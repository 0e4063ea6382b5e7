"""The configuration of a run: one TOML file, one frozen model per section, the environment on top, secrets from files."""

from echo_settings.load import load_settings
from echo_settings.sections import Settings

__all__ = ["Settings", "load_settings"]
