"""A process that answers every request for a chunk at once, with no network and no images.

For tests of what is between policy and executor: it starts in a second and never fails by itself.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from executor_bench import HOME, chunk_message
from graph import RELIABLE, graph
from tabletop_policy import HORIZON, STEP_TIME_S

from vla_runtime.messages.trajectories import chunk_type, message_to_plan, plan_type
from vla_runtime.types import ChunkHeader

_REACH_RAD = 0.1


def main() -> None:
    """Answer until killed: all joints swing slowly around `HOME`."""
    with graph() as made:
        publisher = made.node.create_publisher(chunk_type(), 'action_chunk', RELIABLE)
        number = 0

        def answer(request: Any) -> None:
            nonlocal number
            now_ns = made.node.get_clock().now().nanoseconds
            times_s = now_ns * 1e-9 + STEP_TIME_S * np.arange(1, HORIZON + 1)
            actions = HOME + _REACH_RAD * np.sin(times_s)[:, None]
            header = ChunkHeader(now_ns, message_to_plan(request).episode, number, tied=False)
            publisher.publish(chunk_message(actions, header))
            number += 1

        made.node.create_subscription(plan_type(), 'committed_plan', answer, RELIABLE)
        while True:
            time.sleep(1.0)


if __name__ == '__main__':
    main()
