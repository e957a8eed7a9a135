"""A camera driver as a process: raw 480x640 rgb8 images at a rate, until it is interrupted.

    python benchmark/parts/camera_driver.py /top/image --rate 30

Begins when somebody listens; prints how many images it published when it ends.
"""

from __future__ import annotations

import argparse
import array
import time

import rclpy
from rclpy.executors import ExternalShutdownException
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image

HEIGHT, WIDTH = 480, 640


def blank_image() -> Image:
    """A 480x640 rgb8 message with its data in place."""
    message = Image(height=HEIGHT, width=WIDTH, encoding='rgb8', step=3 * WIDTH)
    message.data = array.array('B', bytes(HEIGHT * WIDTH * 3))
    return message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('topic')
    parser.add_argument('--rate', type=float, default=30.0, help='images a second (default: 30)')
    arguments = parser.parse_args()
    rclpy.init()
    node = rclpy.create_node('camera_driver')
    publisher = node.create_publisher(Image, arguments.topic, qos_profile_sensor_data)
    message, published = blank_image(), 0
    try:
        while not publisher.get_subscription_count():
            rclpy.spin_once(node, timeout_sec=0.05)
        due = time.monotonic()
        while rclpy.ok():
            message.header.stamp = node.get_clock().now().to_msg()
            publisher.publish(message)
            published += 1
            due += 1.0 / arguments.rate
            time.sleep(max(0.0, due - time.monotonic()))
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    print(f'published {published}', flush=True)


if __name__ == '__main__':
    main()
