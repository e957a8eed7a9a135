"""Shared by the study tests: a world, the expert, and a policy that was never trained."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_runtime.models.base.flow_network import build_network
from vla_tabletop.sim.tasks import TIME_LIMIT_S
from vla_tabletop.sim.world import JOINT_NAMES
from vla_tabletop.study import page
from vla_tabletop.study.chunk_sources import ExpertSource
from vla_tabletop.study.tabletop_world import TabletopWorld
from vla_tabletop.training.demo_bundle import write_demo_bundle
from vla_tabletop.training.recipes.act import act_dims
from vla_tabletop.training.recipes.pi05 import pi05_dims
from vla_tabletop.training.vocabulary import train_vocabulary

_STATISTICS = {
    'state.q01': np.full(len(JOINT_NAMES), -2.0),
    'state.q99': np.full(len(JOINT_NAMES), 2.0),
    'actions.q01': np.array([-0.02] * 5 + [0.0]),
    'actions.q99': np.array([0.02] * 5 + [0.05]),
}


@pytest.fixture(scope='session')
def world():
    world = TabletopWorld()
    yield world
    world.close()


@pytest.fixture(scope='session')
def expert() -> ExpertSource:
    return ExpertSource()


@pytest.fixture(scope='module')
def short_tasks() -> Iterator[None]:
    """End tasks after two seconds: one who knows nothing goes on to the time limit."""
    with pytest.MonkeyPatch.context() as patch:
        for family in TIME_LIMIT_S:
            patch.setitem(TIME_LIMIT_S, family, 2.0)
        yield


@pytest.fixture(scope='session')
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for the tabletop with random weights, whose chunks hardly move."""
    folder = tmp_path_factory.mktemp('untrained')
    vocabulary = folder / 'tokenizer.model'
    tokenizer = train_vocabulary(vocabulary, len(JOINT_NAMES))
    dims = pi05_dims(tokenizer.vocabulary_size)
    small = replace(dims.language, width=32, depth=1, mlp_dim=32)
    vision = replace(dims.vision, width=32, depth=1, mlp_dim=32)
    dims = replace(dims, language=small, expert=small, vision=vision)
    torch.manual_seed(0)
    network = build_network('pi05', dims)
    # Zero-initialised modulations would keep the prompt and the images out of the chunk.
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    write_demo_bundle(folder / 'bundle', network, _STATISTICS, vocabulary, {}, episodes=0)
    return folder / 'bundle'


@pytest.fixture(scope='session')
def untrained_act(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of ACT, which reads no instruction."""
    torch.manual_seed(0)
    network = build_network('act', act_dims(0))
    folder = tmp_path_factory.mktemp('untrained_act') / 'bundle'
    write_demo_bundle(folder, network, _STATISTICS, None, {}, episodes=0)
    return folder


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawings, a second of each study, out of a page whose words are looked at."""
    monkeypatch.setattr(page, '_panel', lambda *of_study: '<svg></svg>\n')
