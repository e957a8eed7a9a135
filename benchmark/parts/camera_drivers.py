"""Camera drivers: raw 480x640 images of several cameras from one process.

    python benchmark/parts/camera_drivers.py top/image left/image --frames frames.txt

Each line on stdin is a JSON object that changes one camera from then on:
`{"topic": "top/image", "rate_hz": 12.0, "jitter_s": 0.01, "frozen": false}`; a camera that
is `still` sends one picture under new stamps. A frame is stamped
with the time of its shutter, as drivers do, however late this process gets to publish it. One line
a frame goes to the file: index of the camera, stamp, time of publishing, both in nanoseconds. Ends
with SIGINT or at the end of stdin.
"""

from __future__ import annotations

import argparse
import array
import heapq
import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rclpy
from rclpy.qos import qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image

from vla_runtime.messages.trajectories import ns_to_stamp

HEIGHT, WIDTH = 480, 640
# Time between the cameras' shutters.
PHASE_S = 0.004


def blank_image() -> Image:
    """A 480x640 rgb8 message with its data in place."""
    message = Image(height=HEIGHT, width=WIDTH, encoding='rgb8', step=3 * WIDTH)
    message.data = array.array('B', bytes(HEIGHT * WIDTH * 3))
    return message


@dataclass
class Camera:
    """Present behaviour of one driver."""

    rate_hz: float = 30.0
    jitter_s: float = 0.0
    frozen: bool = False
    still: bool = False


def listen(cameras: dict[str, Camera], ended: threading.Event) -> None:
    """Take changes from stdin until it ends."""
    for line in sys.stdin:
        change = json.loads(line)
        camera = cameras[change.pop('topic')]
        for name, value in change.items():
            setattr(camera, name, value)
    ended.set()


def pictures(index: int) -> list[array.array[int]]:
    """The frames of one camera, by turns: its scene, shifted; the data of 480x640 rgb8 images."""
    row, column = np.mgrid[:480, :640]
    scene = np.stack([row // 2, column // 3, (row + column) * (index + 1) // 8], -1)
    return [
        array.array('B', np.roll(scene.astype(np.uint8), 80 * turn, axis=1).tobytes())
        for turn in range(8)
    ]


def publish(
    topics: list[str], cameras: dict[str, Camera], frames: Path, ended: threading.Event
) -> None:
    """Publish until the end; no frame is equal to the one before it."""
    node = rclpy.create_node('camera_drivers')
    publishers = [node.create_publisher(Image, topic, qos_profile_sensor_data) for topic in topics]
    shown = [pictures(index) for index in range(len(topics))]
    message, drawn = blank_image(), random.Random(0)
    # All cameras of one rate share a grid.
    begins = [time.monotonic() + PHASE_S * index for index in range(len(topics))]
    due = [(begin, index) for index, begin in enumerate(begins)]
    count = 0
    with frames.open('w', encoding='ascii', buffering=1) as log:
        while not ended.is_set():
            at, index = heapq.heappop(due)
            time.sleep(max(0.0, at - time.monotonic()))
            camera = cameras[topics[index]]
            if not camera.frozen:
                count += 1
                late_ns = round((time.monotonic() - at) * 1e9)
                stamp_ns = time.time_ns() - late_ns
                message.data = shown[index][0 if camera.still else count % len(shown[index])]
                message.header.stamp = ns_to_stamp(stamp_ns)
                publishers[index].publish(message)
                log.write(f'{index} {stamp_ns} {time.time_ns()}\n')
            # The next grid time ahead: late frames are skipped.
            period_s = 1.0 / camera.rate_hz
            place = round((max(at, time.monotonic()) - begins[index]) / period_s) + 1
            shake_s = drawn.uniform(-camera.jitter_s, camera.jitter_s)
            heapq.heappush(due, (begins[index] + place * period_s + shake_s, index))
    node.destroy_node()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('topics', nargs='+')
    parser.add_argument('--frames', type=Path, required=True, help='file of all stamps')
    arguments = parser.parse_args()
    cameras = {topic: Camera() for topic in arguments.topics}
    ended = threading.Event()
    # A driver ends with its stdin, never inside a frame.
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    threading.Thread(target=listen, args=(cameras, ended), daemon=True).start()
    try:
        publish(arguments.topics, cameras, arguments.frames, ended)
    finally:
        rclpy.try_shutdown()


if __name__ == '__main__':
    main()
