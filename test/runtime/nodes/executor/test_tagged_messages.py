"""An executor without `vla_interfaces`: trajectories with tags, and a policy that has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from executor_bench import Bench
from graph import RELIABLE, graph
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.messages import trajectories
from vla_runtime.messages.trajectories import chunk_type, message_to_plan, plan_type

pytestmark = pytest.mark.graph

NAMESPACE = '/tagged'


@pytest.fixture
def without_interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that a test starts, and for its own side of the topics."""
    (tmp_path / 'vla_interfaces.py').write_text("raise ImportError('hidden by a test')\n")
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setattr(trajectories, 'typed_messages', lambda: None)


@pytest.mark.usefixtures('without_interfaces')
def test_it_asks_and_is_answered_by_trajectories_with_tags(bundle: Path) -> None:
    with graph() as made:
        bench = Bench(made, bundle, NAMESPACE)
        bench.begin()
        bench.start()
        (plan, *_) = bench.arm.plans
        assert isinstance(plan, JointTrajectory) and plan.header.frame_id.startswith('plan ')
        assert message_to_plan(plan).request is not None
        bench.move(0)
        assert 'trajectories with tags' in bench.process.text()
        bench.arm.close()


@pytest.mark.skipif(trajectories.typed_messages() is None, reason='vla_interfaces is not built')
def test_a_node_that_speaks_the_other_form_is_named(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = chunk_type()
    assert typed is not plan_type()
    # One participant has one type on a topic.
    with graph() as other, graph() as made:
        other.node.create_publisher(typed, f'{NAMESPACE}/action_chunk', RELIABLE)
        (tmp_path / 'vla_interfaces.py').write_text("raise ImportError('hidden by a test')\n")
        monkeypatch.setenv('PYTHONPATH', str(tmp_path))
        monkeypatch.setattr(trajectories, 'typed_messages', lambda: None)
        bench = Bench(made, bundle, NAMESPACE)
        bench.begin()
        status = bench.wait_for_status(
            'the other form', lambda status: 'vla_interfaces' in status.get('policy_waits', '')
        )
        assert 'vla_interfaces/msg/ActionChunk' in status['policy_waits']
        bench.arm.close()
