"""Sokoban in rounds: push every box onto a target, in ECHO's configuration or on boards small enough for a tiny model."""

from echo_tasks.sokoban.task import Sokoban

__all__ = ["Sokoban"]
