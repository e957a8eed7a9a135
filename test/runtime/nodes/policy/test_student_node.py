"""A student of few steps in the ROS graph."""

from __future__ import annotations

import numpy as np
import pytest
from graph import graph
from test_onnx_backend import NODE, begin, observed
from tiny_student import write_tiny_student

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_chunk
from vla_runtime.policy import Policy

pytestmark = pytest.mark.graph


def test_its_chunks_are_made_in_its_steps_alone(tmp_path):
    bundle = write_tiny_student(tmp_path)
    with graph() as made:
        drivers, chunks, reports = begin(made, bundle, 'torch')
        for steps in (2, 1):
            if steps == 1:
                refused = made.set_parameter(NODE, 'denoise_steps', 3)
                assert not refused.successful and 'student_steps' in refused.reason
                assert made.set_parameter(NODE, 'denoise_steps', 1).successful
            count = len(chunks)
            drivers.request()
            made.wait_for(
                lambda count=count: min(len(chunks), len(reports)) > count,
                f'a chunk of {steps} steps',
                meanwhile=drivers,
            )
            report = values_of(reports[count].status[0])
            assert int(report['denoise_steps']) == steps
            policy = Policy.load(bundle, 'torch', settings=PolicySettings(denoise_steps=steps))
            for _ in range(int(report['number']) + 1):
                expected, _ = policy.infer(observed(drivers, report))
            policy.close()
            found = message_to_chunk(chunks[count])[0].actions
            np.testing.assert_allclose(found, expected.actions, rtol=0, atol=1e-5)
