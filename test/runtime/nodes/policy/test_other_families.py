"""The policy node with families that no other test of the graph starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graph import graph
from test_onnx_backend import begin, infer, observed
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.family.declaration import with_cameras
from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import message_to_chunk

pytestmark = pytest.mark.graph


FAMILIES = (
    *('pi0', 'evo1', 'groot_n15', 'groot_n16', 'bitvla', 'diffusion', 'multi_task_dit'),
    *('multi_task_dit_flow', 'openvla_oft'),
)


@pytest.mark.parametrize('family', FAMILIES)
def test_its_chunks_are_the_policys(family, tmp_path):
    spec = tiny_spec(family)
    if spec.images.padding == 'none':
        # The camera whose images are as large as the policy's.
        spec = replace(spec, cameras=spec.cameras[:1], dims=with_cameras(spec.dims, 1))
    bundle = write_tiny_policy(tmp_path / family, spec)
    with graph() as made:
        drivers, chunks, reports = begin(made, bundle, 'torch')
        drivers.request()
        made.wait_for(lambda: chunks and reports, 'a chunk', meanwhile=drivers)
        report = values_of(reports[0].status[0])
        found = message_to_chunk(chunks[0])[0].actions
    seen = observed(drivers, report, [camera.name for camera in spec.cameras])
    expected = infer(bundle, 'torch', seen, report, None)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
