"""The policy node on what comes with a request: who asks, and what a chunk is tied to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from graph import graph
from test_policy_node import Executor, start
from tiny_policy import JOINTS, tiny_spec, write_tiny_policy
from tiny_robot import write_robot
from trajectory_msgs.msg import JointTrajectory

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    folder = tmp_path_factory.mktemp('policy')
    bundle = write_tiny_policy(folder / 'tiny', tiny_spec(advantage='task_newline'))
    robot: Path = write_robot(folder / 'tiny.yaml')
    with graph() as made:
        start(made, bundle, robot)
        made_executor = Executor(made)
        made_executor.prepare()
        yield made_executor


def test_a_second_node_that_asks_is_warned_of_by_name(executor: Executor) -> None:
    node = executor.graph.node
    second = node.create_publisher(JointTrajectory, 'committed_plan', 1)
    status = executor.wait_for_status('requests', '2 publishers', 'the warning')
    assert status.level == status.WARN
    name = f'/{node.get_name()}'
    assert f'2 publishers on /committed_plan: {name}, {name};' in status.message
    node.destroy_publisher(second)
    assert executor.wait_for_status('requests', 'at most one', 'its end').level == status.OK


def test_a_chunk_says_whether_it_was_tied_to_the_plan(executor: Executor) -> None:
    # Five seconds of them, of which a chunk has eight: a busy machine's frames are late.
    rows = np.zeros((100, len(JOINTS)))

    def tied(rows: np.ndarray | None = rows) -> bool:
        (_, header), report = executor.chunk() if rows is None else executor.chunk(rows=rows)
        assert report['tied'] == str(header.tied).lower()
        return header.tied

    def give(name: str, value: object) -> None:
        assert executor.graph.set_parameter(executor.node, name, value).successful

    assert not tied()
    give('real_time_chunking', True)
    assert tied()
    # Nothing is executed, so there is nothing to tie it to.
    assert not tied(rows=None)
    # A tie of no weight is none: the executor is to blend such a chunk.
    give('max_guidance_weight', 0.0)
    assert not tied()
    give('max_guidance_weight', 10.0)
    assert tied()
