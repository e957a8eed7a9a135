"""The page stands on its own, whatever was or was not recorded."""

import re

import cv2
import numpy as np
import pytest

from vla_runtime.demo.instructions import FIRST_UNSEEN_SEED, assignments
from vla_runtime.demo.report import write_report
from vla_runtime.demo.status_line import StatusLine
from vla_runtime.demo.telemetry import (
    NO_VERDICT,
    Attempt,
    Inference,
    Seam,
    Series,
    Telemetry,
    Thumbnail,
)

SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS
OUTSIDE = re.compile(r'(?:src|href)="(?!data:|#)[^"]*"|<script|<link|@import')


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
    told.seams = [Seam(START_NS + SECOND_NS, 1, 2, True, False, 0.02, 0.3)]
    told.inferences = [
        Inference(START_NS, 0, {'vision': 3.0, 'denoise': 9.0, 'total': 12.0}, {'front': 40.0},
                  1.5, 'off', 1.0, 10)
    ]  # fmt: skip
    jpeg = cv2.imencode('.jpg', np.full((24, 32, 3), 99, dtype=np.uint8))[1].tobytes()
    told.thumbnails = [Thumbnail(START_NS + SECOND_NS, 'front', jpeg)]
    told.counters = {'starved_ticks': {'1': 3, '2': 4}}
    return told


def write(tmp_path, told, failure=''):
    path = tmp_path / 'report.html'
    write_report(
        path, told, {'vla_policy': {'seed': 0}}, {'bundle': 'demo'}, {'elbow': 'rad'}, failure
    )
    return path.read_text(encoding='utf-8')


def test_the_page_needs_nothing_from_outside(tmp_path):
    page = write(tmp_path, telemetry())
    assert page.startswith('<!doctype html>')
    assert page.rstrip().endswith('</html>')
    assert not OUTSIDE.search(page)
    assert page.count('<svg') == 4
    assert 'data:image/jpeg;base64,' in page


def test_the_page_says_how_many_instructions_were_completed(tmp_path):
    page = write(tmp_path, telemetry())
    assert '1 of 1 instructions completed; 1 cut off by the end' in page
    assert 'cut off by the end of the demo' in page
    assert 'starved 7' in page


def test_an_instruction_without_a_verdict_counts_as_not_completed(tmp_path):
    seen = telemetry()
    seen.attempts[-1].outcome = NO_VERDICT
    page = write(tmp_path, seen)
    assert '1 of 2 instructions completed</h1>' in page
    assert NO_VERDICT in page


def test_words_from_outside_are_escaped(tmp_path):
    page = write(tmp_path, telemetry(), failure='<policy> died')
    assert 'touch &lt;the&gt; red block' in page
    assert '&lt;policy&gt; died' in page


def test_a_session_that_never_began_has_a_page_too(tmp_path):
    page = write(tmp_path, Telemetry(), failure='policy ended')
    assert '0 of 0 instructions completed' in page
    assert page.count('<svg') == 4


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
