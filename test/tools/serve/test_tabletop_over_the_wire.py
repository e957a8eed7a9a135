"""An episode of the simulated arm whose policy is behind a server."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from paths import ROOT
from policy_servers import Client, running

from vla_runtime.types import ActionChunk, CommittedPlan, Observation
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.tabletop_world import TabletopWorld

DEMO = ROOT / 'engines' / 'demo'
SEED = 3


class RemoteSource(PolicySource):
    """Chunks of a server, where `PolicySource` infers itself."""

    def __init__(self, client: Client) -> None:
        super().__init__(DEMO)
        self._client = client

    def begin(self, condition: Condition, seed: int) -> None:
        super().begin(condition, seed)
        self._client.ask({'endpoint': 'reset', 'seed': self.settings.seed})

    def chunk(
        self, world: Any, observation: Observation, plan: CommittedPlan | None
    ) -> tuple[ActionChunk, bool]:
        actions = self._client.actions(
            {
                'observation': {'image': dict(observation.images), 'state': observation.state},
                'prompt': observation.instruction,
            }
        )
        kinds = tuple(action['kind'] for action in self._client.metadata['actions'])
        step_time_s = self._client.metadata['step_time_s']
        none = np.zeros(0, np.float32)
        return ActionChunk(actions, self.action_names, kinds, step_time_s, none), False


def test_an_episode_through_the_server_is_that_of_the_policy_command_by_command() -> None:
    with closing(TabletopWorld()) as world, closing(PolicySource(DEMO)) as local:
        expected = run_episode(world, local, Condition(), SEED)
        with (
            running(DEMO) as server,
            Client(server.url) as client,
            closing(RemoteSource(client)) as remote,
        ):
            found = run_episode(world, remote, Condition(), SEED)
    assert found.trajectory == expected.trajectory
    assert (found.outcome, found.steps) == (expected.outcome, expected.steps)
