"""Tests of this room talk to ROS: each process on a domain of its own."""

from discovery import announce_often, udp_profile  # noqa: F401 (a fixture)
from graph import isolate

isolate()
announce_often()
