"""Published sizes: each can have another number of cameras."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.family.declaration import observation_steps, with_cameras
from vla_runtime.family.listing import preset, preset_names


@pytest.mark.parametrize('name', preset_names())
def test_a_published_size_can_have_another_number_of_cameras(name):
    published = preset(name)[1]
    # Every camera has a frame of each step.
    frames = observation_steps(published) or 1
    counts = [frames * cameras for cameras in (1, 2, 3, 4, 5)]
    made = [with_cameras(published, count) for count in counts]
    assert [dims.cameras for dims in made] == counts
    steps = set(np.diff([dims.prefix_length for dims in made]))
    assert len(steps) == 1 and steps.pop() > 0
