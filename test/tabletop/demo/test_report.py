"""The page stands on its own, whatever was or was not recorded."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from vla_runtime.cli._numbers import MOST_SEED
from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.messages.trajectories import HandoverReport
from vla_tabletop.demo import plots
from vla_tabletop.demo.report import MEANINGS, write_report
from vla_tabletop.demo.session import StatusLine, assignments
from vla_tabletop.demo.telemetry import (
    NO_VERDICT,
    Attempt,
    Inference,
    Series,
    Telemetry,
    Thumbnail,
)
from vla_tabletop.nodes.parameters import TABLETOP_PARAMETERS
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED

SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS


def telemetry() -> Telemetry:
    """Ten seconds of one joint, one instruction carried out and one not."""
    told = Telemetry()
    series = Series()
    for step in range(1000):
        series.add(START_NS + step * 10_000_000, [float(np.sin(step / 100))])
    told.measured['elbow'] = told.commanded['elbow'] = series
    told.attempts = [
        Attempt('touch <the> red block', 1, START_NS, START_NS + 3 * SECOND_NS, 'success'),
        Attempt('touch the blue block', 2, START_NS + 4 * SECOND_NS),
    ]
    told.handovers = [
        HandoverReport(START_NS + SECOND_NS, 1, 2, True, False, 0.02, 0.3, 'chunk 1 took over')
    ]
    told.inferences = [
        Inference(START_NS, 0, {'vision': 3.0, 'denoise': 9.0, 'total': 12.0}, {'front': 40.0},
                  1.5, 'off', 1.0, 10)
    ]  # fmt: skip
    jpeg = cv2.imencode('.jpg', np.full((24, 32, 3), 99, dtype=np.uint8))[1].tobytes()
    told.thumbnails = [Thumbnail(START_NS + SECOND_NS, 'front', jpeg)]
    told.counters = {
        'starved_ticks': {'1': 3, '2': 4},
        'limited_ticks': {'1': 2},
        'limited.elbow.acceleration': {'1': 1},
        'limited.elbow.velocity': {'1': 2},
    }
    return told


def write(tmp_path, told, failure='', drawn=False):
    path = tmp_path / 'report.html'
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            # A second of each page.
            patch.setattr(plots, 'svg_plot', lambda *of, **options: '<svg></svg>')
        write_report(
            path, told, {'vla_policy': {'seed': 0}}, {'bundle': 'demo'}, {'elbow': 'rad'}, failure
        )
    return path.read_text(encoding='utf-8')


def test_the_page_says_how_many_instructions_were_completed(tmp_path):
    page = write(tmp_path, telemetry())
    assert '1 of 1 instructions completed; 1 cut off by the end' in page
    assert 'cut off by the end of the demo' in page
    assert 'starved 7' in page
    assert 'limited 2 (the motion limiter changed the command: elbow by velocity most, 2)' in page


def test_an_instruction_without_a_verdict_counts_as_not_completed(tmp_path):
    seen = telemetry()
    seen.attempts[-1].outcome = NO_VERDICT
    page = write(tmp_path, seen)
    assert '1 of 2 instructions completed</h1>' in page
    assert NO_VERDICT in page


def test_a_session_that_never_began_has_a_page_too(tmp_path):
    page = write(tmp_path, Telemetry(), failure='policy ended', drawn=True)
    assert '0 of 0 instructions completed' in page
    assert page.count('<svg') == 2 * 5


def test_the_page_fits_a_telephone(tmp_path):
    page = write(tmp_path, telemetry(), drawn=True)
    # Plots have a narrow form, with letters of the same size.
    drawn = re.findall(r'<div class="plot (wide|narrow)"><svg', page)
    assert drawn == ['wide', 'narrow'] * 5
    wide, narrow = (
        [float(svg.get('width').removesuffix('pt')) for svg in svgs(page)][first::2]
        for first in (0, 1)
    )
    assert all(width > 800 for width in wide) and all(width < 360 for width in narrow)


def test_legends_say_what_they_tell_apart(tmp_path):
    told = telemetry()
    told.tick_p99_ms.add(START_NS, [0.2])
    words = texts(write(tmp_path, told, drawn=True))
    assert {'position', 'joint', 'phase', 'lateness', 'front, ms'} <= set(words)


def test_refused_chunks_are_explained(tmp_path):
    told = telemetry()
    assert 'refused' not in write(tmp_path, told)
    told.counters['refused.out_of_order'] = {'1': 2, '2': 3}
    told.counters['refused.limit'] = {'1': 1}
    told.refusals = ["'elbow' leaves <its> limits"]
    page = write(tmp_path, told)
    rows = [row for row in page.split('<tr>') if 'out of order' in row or '>limit<' in row]
    assert '>5<' in rows[0] and MEANINGS[ChunkRefusal.OUT_OF_ORDER] in rows[0]
    assert '>1<' in rows[1]
    assert '&#39;elbow&#39; leaves &lt;its&gt; limits' in page


def test_refused_chunks_have_a_verdict(tmp_path):
    told = telemetry()
    starts = len(told.attempts)
    told.counters['refused.observation_unknown'] = {'1': 1, '2': starts - 1}
    told.counters['refused.not_running'] = {'1': starts + 1}
    told.counters['refused.limit'] = {'1': 1}
    rows = {row.split('<td>')[1].split('<')[0]: row for row in write(tmp_path, told).split('<tr>')
            if '</td><td>' in row and 'class="number"' in row and 'verdict' not in row}  # fmt: skip
    assert 'class="good"' in rows['observation unknown']
    # More than the starts can have given rise to, and a fault at any number.
    assert 'class="bad"' in rows['not running']
    assert 'class="bad"' in rows['limit']


def test_a_reset_is_marked_and_no_motion(tmp_path):
    told = telemetry()
    told.commanded['elbow'] = told.measured['elbow']
    before = longest_line(plots.joints(told, {'elbow': 'rad'}, START_NS))
    told.resets = [(START_NS + 5 * SECOND_NS, START_NS + 5 * SECOND_NS + 100_000_000)]
    assert 'reset' in texts(write(tmp_path, told, drawn=True))
    after = longest_line(plots.joints(told, {'elbow': 'rad'}, START_NS))
    assert after <= before / 2 + 2


def test_the_tracking_error_is_what_a_joint_is_off_the_newest_command(tmp_path):
    told = Telemetry()
    measured, commanded = Series(), Series()
    for step in range(300):
        at_ns = START_NS + step * 10_000_000
        measured.add(at_ns, [0.01 * step])
        # The first second has no command, and nothing is sent from 2 s on.
        if 100 <= step < 200:
            commanded.add(at_ns - 1, [0.01 * step + 0.02])
    told.measured['elbow'], told.commanded['elbow'] = measured, commanded
    times_ns, errors = plots.tracking_error(told, 'elbow')
    assert times_ns[0] == START_NS + SECOND_NS
    assert times_ns[-1] < START_NS + 2.2 * SECOND_NS
    np.testing.assert_allclose(errors[:100], -0.02)
    assert 'tracking error</td><td>at most 0.1700 rad (elbow)' in write(tmp_path, told)
    # What the robot did at a command from before a reset is no error.
    told.resets = [(START_NS + SECOND_NS * 3 // 2, START_NS + SECOND_NS * 8 // 5)]
    times_ns, _ = plots.tracking_error(told, 'elbow')
    begin, end = (np.searchsorted(times_ns, at_ns) for at_ns in told.resets[0])
    assert begin == end
    assert plots.tracking_error(told, 'wrist')[0].size == 0


def test_the_lateness_in_the_table_is_that_of_the_plot(tmp_path):
    told = telemetry()
    for second, late in enumerate((0.5, 10.25, 1.5)):
        told.tick_p99_ms.add(START_NS + second * SECOND_NS, [late])
    assert 'median 1.50 ms, at most 10.25 ms' in write(tmp_path, told)


def test_inputs_of_the_same_age_are_both_seen(tmp_path):
    told = telemetry()
    one = told.inferences[0]
    told.inferences = [replace(one, ages_ms={'front': 40.0, 'wrist': 40.0, 'state': 3.0})]
    words = texts(plots.ages(told, START_NS))
    assert [word for word in words if word.endswith(', ms')] == [
        'front, ms',
        'state, ms',
        'wrist, ms',
    ]


def test_each_instruction_has_its_pictures_in_a_row(tmp_path):
    told = telemetry()
    jpeg = told.thumbnails[0].jpeg
    told.thumbnails = [
        Thumbnail(START_NS + at * SECOND_NS // 10, camera, jpeg)
        for at, camera in ((1, 'wrist'), (2, 'front'), (15, 'front'), (27, 'front'), (28, 'wrist'),
                           (42, 'wrist'), (43, 'front'))
    ]  # fmt: skip
    first, second = write(tmp_path, told).split('<div class="row">')[1:]
    shown = [re.findall(r'<figcaption>([^<]+)<', row) for row in (first, second)]
    assert shown == [
        ['0.2 s, front', '0.1 s, wrist', '2.7 s, front', '2.8 s, wrist'],
        ['4.3 s, front', '4.2 s, wrist'],
    ]


def test_every_refusal_has_a_meaning():
    assert set(MEANINGS) == set(ChunkRefusal)


class TestCurves:
    """Ten minutes of a session, as they are drawn."""

    TIMES = np.arange(60_000) * 0.01

    def test_a_long_curve_is_as_connected_as_a_short_one(self):
        times, values = plots.plotted_curve(self.TIMES, np.sin(self.TIMES))
        assert 500 < len(times) < 5000
        assert not np.isnan(values[:-1]).any()
        assert (times[0], times[-1]) == (self.TIMES[0], self.TIMES[-1])

    def test_where_nothing_came_for_a_while_there_is_no_line(self):
        paused = self.TIMES[(self.TIMES < 200.0) | (self.TIMES > 201.0)]
        times, values = plots.plotted_curve(paused, np.ones(len(paused)))
        (gap,) = np.flatnonzero(np.isnan(values[:-1]))
        assert times[gap] == pytest.approx(200.0, abs=0.02)
        assert times[gap + 1] == pytest.approx(201.0, abs=0.02)

    def test_a_rate_that_falls_for_good_is_no_row_of_gaps(self):
        """100 s at 100 Hz, then 200 s at 5 Hz."""
        times = np.concatenate([np.arange(10_000) * 0.01, 100.0 + np.arange(1000) * 0.2])
        for rising in (times, times[-1] - times[::-1]):
            _, values = plots.plotted_curve(rising, np.ones(len(rising)))
            assert not np.isnan(values[:-1]).any()

    def test_pauses_near_the_ends_and_near_each_other_are_gaps(self):
        times = np.arange(1000) * 0.01
        for after in (0, 400, 404, 998):
            times[after + 1 :] += 1.0
        _, values = plots.plotted_curve(times, np.ones(len(times)))
        assert np.isnan(values[:-1]).sum() == 4

    def test_a_peak_of_one_sample_is_seen(self):
        peak = np.zeros(len(self.TIMES))
        peak[31_234] = 7.0
        times, values = plots.plotted_curve(self.TIMES, peak)
        assert times[np.nanargmax(values)] == self.TIMES[31_234]
        assert np.nanmax(values) == 7.0

    def test_ages_of_inputs_have_gaps_where_there_was_no_inference(self):
        told = Telemetry()
        told.inferences = [
            Inference(
                START_NS + tick * SECOND_NS // 5, tick, {}, {'front': 40.0}, 1.5, 'off', 1.0, 1
            )
            for tick in (*range(50), *range(100, 150))
        ]
        assert longest_line(plots.ages(told, START_NS)) == 50

    def test_one_sample_is_a_point(self):
        times, values = plots.plotted_curve(np.array([3.0]), np.array([1.0]))
        assert (times[0], values[0]) == (3.0, 1.0)

    def test_the_control_loop_is_drawn_from_its_first_second_to_its_last(self):
        told = Telemetry()
        for second in range(600):
            told.tick_p99_ms.add(START_NS + second * SECOND_NS, [second % 7 / 7])
        assert longest_line(plots.ticks(told, START_NS)) > 50


SVG = '{http://www.w3.org/2000/svg}'


def svgs(page):
    return [ElementTree.fromstring(text) for text in re.findall(r'<svg.*?</svg>', page, re.DOTALL)]


def texts(page):
    return [text.text for svg in svgs(page) for text in svg.iter(f'{SVG}text')]


def longest_line(svg):
    """Points of the longest unbroken line of a plot."""
    paths = [path.get('d') for path in svgs(svg)[0].iter(f'{SVG}path')]
    strokes = [stroke for path in paths for stroke in path.split('M')]
    return max(1 + stroke.count('L') for stroke in strokes)


def test_the_status_line_says_what_is_known():
    line = StatusLine(telemetry(), 30.0, 0.0)
    text = line.text('touch the red block', 12.34)
    for part in ('12.3 s of 30', 'chunk 1', 'cache off', '12 ms', 'starved 7', 'done 1 of 1'):
        assert part in text


@pytest.mark.parametrize('seed', [0, 1])
def test_assignments_are_reproducible_and_never_from_training(seed):
    first, second = assignments(seed), assignments(seed)
    for _ in range(6):
        one, other = next(first), next(second)
        assert one == other
        assert one.seed >= FIRST_UNSEEN_SEED
    assert next(assignments(0)).seed != next(assignments(1)).seed


def test_the_scenes_of_the_largest_seed_are_ones_that_the_simulated_robot_takes():
    (seed,) = (row for row in TABLETOP_PARAMETERS if row.name == 'seed')
    scenes = assignments(MOST_SEED)
    assert all(next(scenes).seed < seed.maximum / 2 for _ in range(10))
