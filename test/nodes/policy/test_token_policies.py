"""The policy node with policies that answer in tokens: packed requests, and malformed streams."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest
import torch
from diagnostic_msgs.msg import DiagnosticArray
from graph import graph
from network_cases import network_case_paths, random_network
from pi0_fast_cases import load_pi0_fast_case
from safetensors.torch import save_file
from std_srvs.srv import Trigger
from test_onnx_backend import NODE, TASK, infer, observed, start
from tiny_policy import CAMERAS, JOINTS, tiny_spec, tiny_statistics, write_tiny_policy
from tiny_robot import STEP_TIME_S, Drivers
from trajectory_msgs.msg import JointTrajectory

from vla_runtime.bundle.schema import WEIGHTS_FILE, ImageSpec
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.families.pi0_fast.dimensions import ACTION_TOKENIZER
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_chunk, plan_to_message
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.types import PlanRequest

pytestmark = pytest.mark.graph
OTHER_TASK = 'open the drawer'


def test_packed_requests_are_answered_by_the_instruction_in_force_and_after_a_reset(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'openvla', tiny_spec('openvla'))
    with graph() as made:
        node = start(made, bundle, '-p', 'pipeline:=packed', backend='torch')
        drivers = Drivers(made)
        # A joint state may be lost on its way: what lies between two others must not depend on it.
        drivers.moving = False
        chunks = made.collect(JointTrajectory, '/action_chunk')
        reports = made.collect(DiagnosticArray, f'{NODE}/report')
        assert made.transition(NODE, 'configure')
        assert made.transition(NODE, 'activate')
        drivers.instruct(TASK)

        numbers = count()

        def ask(episode: int = 0) -> None:
            """Open a request more, as an executor does while the policy takes them."""
            drivers()
            request = PlanRequest(
                np.zeros((0, len(JOINTS))),
                JOINTS,
                ['position'] * len(JOINTS),
                STEP_TIME_S,
                stamp_ns=drivers.clock_ns(),
                episode=episode,
                certain=0,
                request=next(numbers),
            )
            drivers._plan.publish(plan_to_message(request))

        made.wait_for(lambda: len(reports) > 1, 'answers', meanwhile=ask)
        for number in range(2):
            report = values_of(reports[number].status[0])
            assert (report['pipeline'], report['instruction']) == ('packed', TASK)
            assert int(report['runs.expert']) == len(tiny_spec('openvla').actions) - 1
        report = values_of(reports[0].status[0])
        found = message_to_chunk(chunks[0], step_time_s=STEP_TIME_S)[0].actions
        expected = infer(bundle, 'torch', observed(drivers, report), report, None)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)

        drivers.instruct(OTHER_TASK)

        def answered(task: str, episode: int):
            for one in reports:
                values = values_of(one.status[0])
                if (values['instruction'], values['episode']) == (task, str(episode)):
                    return values
            return None

        made.wait_for(lambda: answered(OTHER_TASK, 0), 'the other task', meanwhile=ask)
        last = next(
            number
            for number, one in enumerate(reports)
            if values_of(one.status[0])['instruction'] == OTHER_TASK
        )
        # None of the instruction before comes after it.
        assert all(values_of(one.status[0])['instruction'] == OTHER_TASK for one in reports[last:])
        assert made.call(Trigger, f'{NODE}/reset', Trigger.Request()).success
        made.wait_for(
            lambda: answered(OTHER_TASK, 1),
            'an answer of the next episode',
            meanwhile=lambda: ask(episode=1),
        )
        assert values_of(reports[-1].status[0])['episode'] == '1'
        node.stop(SIGKILL)
        before = len(chunks)
        start(made, bundle, '-p', 'pipeline:=packed', backend='torch')
        assert made.transition(NODE, 'configure')
        assert made.transition(NODE, 'activate')
        drivers.instruct(TASK)
        made.wait_for(
            lambda: len(chunks) > before, 'a chunk of the node started again', meanwhile=ask
        )


def write_refusing_policy(target: Path) -> Path:
    """A pi0-FAST policy of random weights, which never writes `Action:` first."""
    case = load_pi0_fast_case(network_case_paths('pi0_fast')[0])
    dims = replace(
        case.network.dims,
        cameras=len(CAMERAS),
        action_dim=3,
        checks_prefix=True,
        prompt_length=96,
    )
    spec = tiny_spec('openvla')
    spec = replace(
        spec,
        name='refusing',
        family='pi0_fast',
        dims=dims,
        images=ImageSpec('centre', 'bilinear'),
        prompt=PromptFormat(template='pi0_fast', cleaning='lerobot'),
    )
    with torch.no_grad():
        network = random_network('pi0_fast', dims)
    with new_bundle(target) as folder:
        save_file(network.state_dict(), folder / WEIGHTS_FILE)
        write_statistics(folder, tiny_statistics(spec))
        (folder / 'tokenizer.json').write_bytes(case.text_tokenizer.read_bytes())
        (folder / ACTION_TOKENIZER).write_bytes(case.action_tokenizer.read_bytes())
        seal(folder, spec)
    return target


def test_a_malformed_stream_is_no_chunk_and_the_reason_is_said(tmp_path):
    bundle = write_refusing_policy(tmp_path / 'pi0_fast')
    with graph() as made:
        start(made, bundle, backend='torch')
        drivers = Drivers(made)
        chunks = made.collect(JointTrajectory, '/action_chunk')
        status = made.collect(DiagnosticArray, '/diagnostics')
        assert made.transition(NODE, 'configure')
        assert made.transition(NODE, 'activate')
        drivers.instruct('2 5 1')
        drivers.request()

        def reasons() -> list[str]:
            found = (one.message for message in status for one in message.status)
            return [text for text in found if 'the chunk is refused' in text]

        made.wait_for(reasons, 'the reason', meanwhile=drivers)
        assert not chunks
