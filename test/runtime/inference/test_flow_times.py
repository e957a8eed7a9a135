"""Flow times of the Euler steps."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.inference.denoise import flow_times


@pytest.mark.parametrize('steps', [1, 3, 10, 32, 100])
def test_summed_times_are_those_of_a_float32_that_counts_down(steps):
    time, step, expected = np.float32(1.0), np.float32(-1.0 / steps), []
    while time >= -step / 2:
        expected.append(time)
        time = np.float32(time + step)
    np.testing.assert_array_equal(flow_times(steps, 'summed'), np.array(expected, np.float64))
    np.testing.assert_allclose(flow_times(steps, 'summed'), flow_times(steps), atol=1e-5)


def test_times_are_exact_unless_told_otherwise():
    np.testing.assert_array_equal(flow_times(4), [1.0, 0.75, 0.5, 0.25])
    assert (flow_times(10) != flow_times(10, 'summed')).any()
