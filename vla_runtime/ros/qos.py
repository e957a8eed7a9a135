"""Quality of service of the nodes' own topics."""

from __future__ import annotations

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
# Of a stream whose older messages are of no use: requests, commands.
NEWEST = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(
    depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)
