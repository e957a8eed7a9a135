"""Frames that came and belong together are found, however fast one camera is beside another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vla_runtime.robot.match import EarlierFrame
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.synchronizer import Selection, Synchronizer, SyncLimits

S = 1_000_000_000
MS = 1_000_000
BEGIN = 1000 * S
LASTS_S = 1.5
ASKED_EVERY = 23 * MS
MOST_FRAMES = 120

a_camera = st.tuples(
    st.integers(5, 240),  # Hz
    st.integers(0, 450),  # milliseconds from stamp to arrival
    st.floats(0.0, 1.0),  # phase, periods
)
# Half a second at 240 Hz, thinned to 120 frames: a wider tolerance allows it.
tolerances = st.sampled_from([10, 20, 50, 100])


def arrivals(cameras) -> list[tuple[int, str, int]]:
    """(ROS time of arrival, camera, stamp) of all frames, in the order in which they arrive."""
    events = []
    for name, (rate, latency_ms, phase) in cameras.items():
        for number in range(int(LASTS_S * rate)):
            stamp = BEGIN + round((number + phase) / rate * S)
            events.append((stamp + latency_ms * MS, name, stamp))
    return sorted(events)


def newest_together(arrived: dict[str, list[int]], limits: SyncLimits, now: int) -> int | None:
    """Stamp of the newest selection of all frames that ever arrived; None without one."""
    usable = {
        name: [stamp for stamp in stamps if now - stamp <= limits.max_age_ns]
        for name, stamps in arrived.items()
    }
    if not all(usable.values()):
        return None
    while True:
        newest = max(usable, key=lambda name: usable[name][-1])
        stamp, oldest = usable[newest][-1], min(stamps[-1] for stamps in usable.values())
        if stamp - oldest <= limits.tolerance_ns:
            return stamp
        usable[newest].pop()
        if not usable[newest]:
            return None


def run(cameras, limits: SyncLimits, earlier=None) -> int:
    """Check every answer against all frames that arrived; return the number of selections."""
    made = Synchronizer(
        {**dict.fromkeys(cameras, '/'), **(earlier or {})}, [], limits, earlier or {}
    )
    arrived: dict[str, list[int]] = {name: [] for name in cameras}
    selections, last_ns, asks_at = 0, 0, BEGIN
    for now, camera, stamp in arrivals(cameras):
        while asks_at < now:
            best = newest_together(arrived, limits, asks_at)
            found = made.select(asks_at)
            if best is None:
                assert not isinstance(found, Selection)
            else:
                assert isinstance(found, Selection), found
                assert best - limits.tolerance_ns <= found.stamp_ns <= best
                assert found.stamp_ns >= last_ns
                selections, last_ns = selections + 1, found.stamp_ns
            asks_at += ASKED_EVERY
        made.add_frame(camera, Frame(stamp, 0, None), now)
        arrived[camera].append(stamp)
        assert len(made._cameras[camera]._kept) <= MOST_FRAMES
    return selections


@given(st.lists(a_camera, min_size=2, max_size=4), tolerances)
def test_whatever_the_rates_frames_that_belong_together_are_found(cameras, tolerance_ms):
    run(dict(zip('abcd', cameras, strict=False)), SyncLimits(tolerance_ms * MS, 500 * MS))


def test_a_slow_late_camera_beside_a_fast_one_answers_every_request():
    for rate in (30, 60, 90, 120, 200, 240):
        cameras = {'fast': (rate, 5, 0.0), 'slow': (5, 150, 0.0)}
        # From the first slow frame on, a request every 23 ms.
        assert run(cameras, SyncLimits(50 * MS, 500 * MS)) >= (LASTS_S - 0.35) * S // ASKED_EVERY


def test_an_earlier_frame_of_a_fast_camera_is_of_its_age():
    earlier = {'before': EarlierFrame('fast', 600 * MS)}
    cameras = {'fast': '/fast', 'before': '/fast', 'slow': '/slow'}
    made = Synchronizer(cameras, [], SyncLimits(50 * MS, 500 * MS), earlier)
    for now, camera, stamp in arrivals({'fast': (240, 5, 0.0), 'slow': (5, 150, 0.0)}):
        made.add_frame(camera, Frame(stamp, 0, None), now)
        found = made.select(now)
        if now > BEGIN + S:
            assert isinstance(found, Selection), found
            apart_ns = found.frames['fast'].stamp_ns - found.frames['before'].stamp_ns
            assert abs(apart_ns - 600 * MS) <= 15 * MS
