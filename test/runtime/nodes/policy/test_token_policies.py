"""The policy node with policies that answer in tokens: packed requests, and malformed streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from graph import graph
from network_cases import network_case_paths, random_network
from pi0_fast_cases import load_pi0_fast_case
from safetensors.torch import save_file
from test_onnx_backend import NODE, TASK, start
from tiny_policy import CAMERAS, tiny_spec, tiny_statistics, write_tiny_policy
from tiny_robot import Drivers

from vla_runtime.bundle.schema import WEIGHTS_FILE, ImageSpec
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.declarations.pi0_fast import ACTION_TOKENIZER
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import chunk_type
from vla_runtime.processing.prompts import PromptFormat

pytestmark = pytest.mark.graph


def test_packed_chunks_of_one_action_are_refused_with_the_remedy(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'openvla', tiny_spec('openvla'))
    with graph() as made:
        node = start(made, bundle, '-p', 'pipeline:=packed', backend='torch')
        assert not made.transition(NODE, 'configure')
        made.wait_for(lambda: "use 'latency'" in node.text(), 'the remedy')
        assert made.set_parameter(NODE, 'pipeline', 'latency').successful
        assert made.transition(NODE, 'configure')
        changed = made.set_parameter(NODE, 'pipeline', 'packed')
        assert not changed.successful and "use 'latency'" in changed.reason
        assert made.transition(NODE, 'activate')
        drivers = Drivers(made)
        chunks = made.collect(chunk_type(), '/action_chunk')
        drivers.instruct(TASK)
        drivers.request()
        made.wait_for(lambda: chunks, 'an answer alone', meanwhile=drivers)


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
        node = start(made, bundle, backend='torch')
        drivers = Drivers(made)
        chunks = made.collect(chunk_type(), '/action_chunk')
        status = made.collect(DiagnosticArray, '/diagnostics')
        assert made.transition(NODE, 'configure')
        assert made.transition(NODE, 'activate')
        drivers.instruct('2 5 1')
        drivers.request()

        def reasons() -> list[DiagnosticStatus]:
            found = (one for message in status for one in message.status)
            return [one for one in found if 'the chunk is refused' in one.message]

        made.wait_for(reasons, 'the reason', meanwhile=drivers)
        assert values_of(reasons()[-1])['refused_answers'] == '1'
        drivers.request()
        made.wait_for(
            lambda: values_of(reasons()[-1])['refused_answers'] == '2',
            'the second to be counted',
            meanwhile=drivers,
        )
        made.wait_for(lambda: 'the chunk is refused' in node.text(), 'the reason in the log')
        assert not chunks
