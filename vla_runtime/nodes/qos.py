"""Quality of service of the nodes' own topics."""

from __future__ import annotations

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
# Where nothing may be lost, as in a recording and its replay.
LOSSLESS = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE)
# Of a stream whose older messages are of no use.
NEWEST = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)
# How requests and their chunks are heard. A request is sent again until its chunk has come: a lost
# one costs 0.1 s. To a reliable reader it costs more, because all after it waits for the writer's
# next heartbeat, which Fast DDS sends every 3 s.
REPEATED = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
# Every chunk is judged and counted, also where several come at once.
CHUNKS = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED = QoSProfile(
    depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL
)
# How a stream of states is heard by who wants the newest state only.
NEWEST_HEARD = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
