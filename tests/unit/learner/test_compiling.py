"""What stands in the way of `[learner] compile` is said before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echo_learner.training.compiling import compile_layers
from echo_schemas.errors import UserError


class Layer(torch.nn.Module):
    def forward(self, hidden: Any) -> Any:
        return hidden + 1


class Model(torch.nn.Module):
    """As much of a causal language model as is looked at."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        self.config = type("Config", (), {"model_type": "odd"})()

    def get_decoder(self) -> Any:
        return self


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.training.compiling.shutil.which", lambda _: None)
    with pytest.raises(UserError, match=r"no C compiler.*Install gcc"):
        compile_layers(Model(torch.nn.ModuleList([Layer()])))


@pytest.mark.parametrize("layers", [None, [1, 2]])
def test_a_model_without_a_list_of_layers(monkeypatch: pytest.MonkeyPatch, layers: Any) -> None:
    monkeypatch.setattr("echo_learner.training.compiling.shutil.which", lambda name: name)
    with pytest.raises(UserError, match="The layers of a model of the type odd cannot be compiled"):
        compile_layers(Model(layers))
