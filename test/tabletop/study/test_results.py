"""Results of a study: JSON, CSV and the page."""

import csv
import json
import re
from dataclasses import replace
from html import escape
from itertools import count
from xml.etree import ElementTree

import matplotlib
import onnxruntime
import pytest
from paths import ROOT

from vla_runtime.bundle.success import difference_interval
from vla_runtime.files.json_file import LARGEST_JSON
from vla_tabletop.study import page
from vla_tabletop.study.catalogue import Study
from vla_tabletop.study.condition import Condition, grid
from vla_tabletop.study.page import study_page, success_figure
from vla_tabletop.study.results import Provenance, read_studies, study_record, write_study
from vla_tabletop.study.runner import episode_seeds, run_conditions

RESULTS = ROOT / 'benchmark' / 'results'
DRAWING = re.compile('<svg.*?</svg>', re.DOTALL)
NOTHING_DRAWN = '<svg></svg>\n'
EXPERT = Condition(chunk_source='expert')
STUDY = Study(
    'small',
    'A title with <brackets> & more',
    'Does it work?',
    grid(EXPERT, handover=('switch', 'blend'), replan_interval=(4, 16)),
    x='replan_interval',
    episodes=2,
    reference=Condition(chunk_source='expert', handover='switch', replan_interval=4),
)
ORIGIN = Provenance(
    command='vla_runtime study small',
    bundle='none',
    bundle_sha256='ab' * 32,
    seeds=(1, 3),
    code='<commit>-dirty',
    source_sha256='cd' * 32,
)


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    work = tmp_path_factory.mktemp('work')
    return run_conditions(STUDY.conditions, None, episode_seeds(0, 2), work, progress=False)


@pytest.fixture(scope='module')
def record(results):
    return study_record(STUDY, ORIGIN, results)


def test_json_holds_every_episode_and_how_to_get_it_again(record, tmp_path):
    json_path, _ = write_study(tmp_path, record)
    # However many there are.
    json_path.write_text(json_path.read_text() + ' ' * LARGEST_JSON)
    (found,) = read_studies(tmp_path)
    assert found == json.loads(json_path.read_text()) == json.loads(json.dumps(record))
    assert found['command'] == 'vla_runtime study small'
    assert found['seeds'] == [1, 3]
    assert (found['code'], found['source_sha256']) == ('<commit>-dirty', 'cd' * 32)
    first = found['conditions'][0]
    assert first['settings']['handover'] == 'switch'
    assert first['label'] == {'replan_interval': '4', 'handover': 'switch'}
    assert len(first['episodes']) == 2
    assert first['groups']['all']['success'] == {
        'count': 2,
        'rate': 1.0,
        'low': pytest.approx(0.3424, abs=1e-4),
        'high': 1.0,
    }
    assert first['is_reference'] and first['versus_reference'] is None
    versus = found['conditions'][1]['versus_reference']
    low, high = difference_interval(2, 0, 0)
    assert versus == {'won': 0, 'lost': 0, 'p': 1.0, 'low': low, 'high': high}


@pytest.mark.usefixtures('undrawn')
def test_conditions_may_each_have_a_reference_of_their_own(results):
    study = replace(STUDY, reference={'handover': 'switch'})
    found = study_record(study, ORIGIN, results)['conditions']
    assert [one['is_reference'] for one in found] == [
        one.handover == 'switch' for one in study.conditions
    ]
    assert [one['versus_reference'] is None for one in found] == [
        one['is_reference'] for one in found
    ]
    drawn = study_page([study_record(study, ORIGIN, results)])
    assert drawn.count('<td>reference</td>') == 2
    assert drawn.count('+0 -0, p 1, ') == 2


def test_the_version_of_onnx_runtime_stands_in_a_study_that_ran_on_it(record, results):
    assert 'onnxruntime' not in record['versions']
    condition = Condition(backend='onnxruntime')
    episodes = next(iter(results.values()))
    study = replace(STUDY, conditions=(condition,), reference=None)
    found = study_record(study, ORIGIN, {condition: episodes})
    assert found['versions'] == {**record['versions'], 'onnxruntime': onnxruntime.__version__}


def test_no_number_of_the_json_is_nan(record):
    json.dumps(record, allow_nan=False)


def test_csv_has_a_row_a_condition_and_family(record, tmp_path):
    _, csv_path = write_study(tmp_path, record)
    with csv_path.open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert [(row['replan_interval'], row['handover'], row['family']) for row in rows[:4]] == [
        ('4', 'switch', 'all'),
        ('4', 'switch', 'colour'),
        ('4', 'switch', 'position'),
        ('16', 'switch', 'all'),
    ]
    assert rows[0]['success_count'] == '2'
    assert float(rows[0]['jerk_seams_value']) > 0.0
    assert rows[3]['versus_reference_p'] == '1'
    low, high = difference_interval(2, 0, 0)
    assert float(rows[3]['versus_reference_low']) == pytest.approx(low, rel=1e-3)
    assert float(rows[3]['versus_reference_high']) == pytest.approx(high, rel=1e-3)


def test_the_same_results_give_the_same_files(record, tmp_path):
    for folder in ('a', 'b'):
        write_study(tmp_path / folder, record)
    for name in ('study_small.json', 'study_small.csv'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
    assert study_page([record]) == study_page([record])


def test_the_page_needs_nothing_but_itself(record):
    page = study_page([record, record | {'study': 'other'}])
    # A drawing of success, of the steps to it, of both jumps and of three jerks, of each study.
    assert page.count('<svg') == 2 * 7
    # Namespaces and the plots' own marks aside, it refers to nothing outside.
    for reference in re.findall(r'(?:href|src)="([^"]*)"', page):
        assert reference.startswith('#'), reference
    assert '<script' not in page and '<link' not in page
    assert 'A title with &lt;brackets&gt; &amp; more' in page
    assert 'vla_runtime study small' in page
    assert 'success, %' in page


@pytest.mark.usefixtures('undrawn')
def test_the_page_says_which_code_ran_a_study_and_where_nobody_noted_it(record):
    assert 'code not noted' not in study_page([record])
    assert f'code {escape(record["code"])}; ' in study_page([record])
    old = {name: value for name, value in record.items() if name != 'code'}
    assert study_page([record, old | {'study': 'old'}]).count('code not noted') == 1


def test_a_share_that_rounds_to_beyond_its_interval_is_drawn(record):
    whole = json.loads(json.dumps(record))
    whole['conditions'][0]['groups']['all']['success']['high'] = 1.0 - 1e-16
    assert '<svg' in study_page([whole])


def test_a_stray_file_among_the_results_is_named(record, tmp_path):
    write_study(tmp_path, record)
    stray = tmp_path / 'study_zzz.json'
    for text, words in (
        ('{bad', 'cannot be read'),
        ('[]', 'is not a mapping'),
        ('{}', 'field study: is missing'),
        (json.dumps({**record, 'conditions': [{}]}), r'field conditions\[0\].label: is missing'),
    ):
        stray.write_text(text)
        with pytest.raises(ValueError, match=rf'study_zzz\.json: {words}.*move it elsewhere'):
            read_studies(tmp_path)


COMMITTED = RESULTS / 'study.html'


@pytest.mark.usefixtures('undrawn')
def test_the_committed_page_says_what_the_committed_results_say():
    texts = (COMMITTED.read_text(encoding='utf-8'), study_page(read_studies(RESULTS)))
    committed, made = (DRAWING.split(text) for text in texts)
    how = 'vla_runtime study --page --out benchmark/results'
    assert committed == made, f'the committed page is not that of the results; run: {how}'


# A drawing takes a quarter of a second. A page is written whole, so one that is old has others.
@pytest.mark.thorough
@pytest.mark.parametrize('every', [9, pytest.param(1, marks=pytest.mark.slow)])
def test_the_committed_page_draws_what_the_committed_results_say(monkeypatch, every):
    committed = COMMITTED.read_text(encoding='utf-8')
    if f'Matplotlib v{matplotlib.__version__},' not in committed:
        pytest.skip(f'it was drawn by another Matplotlib than {matplotlib.__version__}')
    draw, number = page._panel, count()
    monkeypatch.setattr(
        page, '_panel', lambda *of: NOTHING_DRAWN if next(number) % every else draw(*of)
    )
    made = DRAWING.findall(study_page(read_studies(RESULTS)))
    drawings = DRAWING.findall(committed)
    assert len(made) == len(drawings)
    assert made[::every] == drawings[::every]


def test_a_figure_of_success_is_a_picture_of_its_own_with_every_curve(record):
    drawn = success_figure(record)
    assert ElementTree.fromstring(drawn).tag == '{http://www.w3.org/2000/svg}svg'
    for curve in ('switch', 'blend'):
        assert f'>{curve}</text>' in drawn
    assert drawn == success_figure(record)
