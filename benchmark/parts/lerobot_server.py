"""LeRobot's policy server and its clients, for `serve_beside.py`, run by the Python of LeRobot.

    lerobot_server.py serve OPTIONS PORT
        its server of `async_inference`, as it comes
    lerobot_server.py robots OPTIONS PORT COUNT SECONDS
        so many clients at once; writes one JSON line

OPTIONS is that of `lerobot_worker.py`. A client sends an observation with a number of its own and
asks for actions, as LeRobot's `robot_client` does, then begins anew. The server keeps one
observation and one policy for all of them: a client may get another's chunk, or none.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from typing import Any

import grpc
import numpy as np
from lerobot_worker import CAMERAS, JOINTS, SIZES, TASK, Options, prepare_lerobot

# As many as there are observations of a client in a run.
_NUMBERS = 1_000_000


def serve(options: Options, port: int) -> None:
    prepare_lerobot(options)
    import torch
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.async_inference.policy_server import serve as run

    torch.set_num_threads(options.threads)
    # No pause to reach a wanted latency.
    run(PolicyServerConfig(host='127.0.0.1', port=port, inference_latency=0.0))


def cameras_of(options: Options) -> list[str]:
    return [f'camera{i + 1}' for i in range(CAMERAS[options.family])]


def joints_of(options: Options) -> list[str]:
    return [f'joint_{i}' for i in range(JOINTS[options.family])]


def features(options: Options) -> dict[str, Any]:
    """Return the observation as LeRobot's robots describe theirs."""
    names, axes = joints_of(options), ['height', 'width', 'channels']
    image = {'dtype': 'image', 'shape': (*SIZES[options.family], 3), 'names': axes}
    return {
        'observation.state': {'dtype': 'float32', 'shape': (len(names),), 'names': names},
        **{f'observation.images.{camera}': image for camera in cameras_of(options)},
    }


class Robot:
    """One client.

    `own`: milliseconds of each chunk of its own; `foreign`: chunks of others; `seconds`: for which
    it asked.
    """

    def __init__(self, options: Options, port: int, number: int) -> None:
        from lerobot.transport import services_pb2_grpc

        self.options, self.number = options, number
        self.own: list[float] = []
        self.seconds = 0.0
        self.foreign = self.none = 0
        self._channel = grpc.insecure_channel(f'127.0.0.1:{port}')
        self.stub = services_pb2_grpc.AsyncInferenceStub(self._channel)
        random = np.random.default_rng(number)
        size = (*SIZES[options.family], 3)
        self._looks = [
            {
                **{joint: float(random.uniform(-1, 1)) for joint in joints_of(options)},
                **{
                    camera: random.integers(0, 256, size, dtype=np.uint8)
                    for camera in cameras_of(options)
                },
                'task': TASK,
            }
            for _ in range(3)
        ]

    def set_up(self) -> None:
        """Let the server load the policy, as the first message of a client does."""
        from lerobot.async_inference.helpers import RemotePolicyConfig
        from lerobot.transport import services_pb2

        self.stub.Ready(services_pb2.Empty())
        config = RemotePolicyConfig(
            self.options.family, self.options.folder, features(self.options), 50, 'cpu'
        )
        self.stub.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(config)))

    def run(self, seconds: float) -> None:
        """Ask for so long; the last chunk began within it."""
        turn, begin_s = 0, time.perf_counter()
        while (now_s := time.perf_counter()) - begin_s < seconds:
            turn += 1
            mine = self.number * _NUMBERS + turn
            self._send(mine, self._looks[turn % len(self._looks)])
            found = self._receive()
            if found is None:
                self.none += 1
            elif found == mine:
                self.own.append((time.perf_counter() - now_s) * 1e3)
            else:
                self.foreign += 1
        self.seconds = time.perf_counter() - begin_s

    def _send(self, number: int, look: dict[str, Any]) -> None:
        from lerobot.async_inference.helpers import TimedObservation
        from lerobot.transport import services_pb2
        from lerobot.transport.utils import send_bytes_in_chunks

        seen = TimedObservation(
            timestamp=time.time(), timestep=number, observation=look, must_go=True
        )
        self.stub.SendObservations(
            send_bytes_in_chunks(pickle.dumps(seen), services_pb2.Observation)
        )

    def _receive(self) -> int | None:
        from lerobot.transport import services_pb2

        answer = self.stub.GetActions(services_pb2.Empty())
        return pickle.loads(answer.data)[0].get_timestep() if answer.data else None


def run_robots(options: Options, port: int, count: int, seconds: float) -> None:
    prepare_lerobot(options)
    robots = [Robot(options, port, number) for number in range(count)]
    # Each client of its own would load the policy again, and empty the queue of the others.
    robots[0].set_up()
    robots[0].run(0.1)
    robots[0].own.clear()
    threads = [threading.Thread(target=robot.run, args=(seconds,)) for robot in robots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        json.dumps(
            {
                'ms': [one for robot in robots for one in robot.own],
                'chunks_per_s': sum(len(robot.own) / robot.seconds for robot in robots),
                'foreign': sum(robot.foreign for robot in robots),
                'none': sum(robot.none for robot in robots),
            }
        )
    )


def main() -> None:
    os.environ.setdefault('HF_HUB_OFFLINE', '1')
    verb, given, port, *rest = sys.argv[1:]
    options = Options(**json.loads(given))
    if verb == 'serve':
        serve(options, int(port))
    else:
        run_robots(options, int(port), int(rest[0]), float(rest[1]))


if __name__ == '__main__':
    main()
