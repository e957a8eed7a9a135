"""Results that no change of the code's form may change: those of `record_of_results.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference_cases import SHIPPED, cases_folder
from thorough import thorough_but

RECORD = json.loads(Path(__file__).with_name('record_of_results.json').read_text())
MACHINE = RECORD.pop('machine')
PARTS = sorted({name.rpartition('/')[0] for name in RECORD})
QUICK = [part for part in PARTS if not part.startswith('onnx/') or part.endswith('/float32')]
MENDED = """
A change that is wanted is written by
    ./run exec python test/write_record.py PART
and the commit message says why it is right."""

pytestmark = [
    pytest.mark.cases,
    pytest.mark.skipif(cases_folder() != SHIPPED, reason='the record is of the shipped cases'),
]


@pytest.mark.parametrize('part', thorough_but([*QUICK, 'onnx/pi05/bfloat16'], PARTS))
def test_a_part_is_as_recorded(part: str, tmp_path: Path):
    # Everything that it imports takes seconds, which collecting these tests does without.
    from record_of_results import difference, entries_of, machine, parts

    others = {name for name in ('torch', 'onnx') if machine()[name] != MACHINE[name]}
    if part.startswith('onnx/') and others:
        pytest.skip(f'another {" and ".join(sorted(others))} makes other graphs')
    found = entries_of(part, parts()[part], tmp_path)
    recorded = {name: one for name, one in RECORD.items() if name.rpartition('/')[0] == part}
    told = [
        f'{name}: {text}'
        for name in sorted({*found, *recorded})
        if (text := difference(found.get(name), recorded.get(name), machine(), MACHINE))
    ]
    if told:
        pytest.fail('\n'.join([*told, MENDED]), pytrace=False)


def test_the_record_has_every_part():
    from record_of_results import parts

    assert sorted(parts()) == PARTS, MENDED


def test_numbers_are_held_to_the_bit_here_and_nearly_elsewhere():
    import numpy as np
    from record_of_results import BOUND, difference, of_numbers

    numbers = np.linspace(-3, 3, 50)
    recorded, drawn = of_numbers([numbers]), of_numbers([numbers], drawn=True)
    near, far = (of_numbers([numbers * (1 + part * BOUND)]) for part in (0.1, 10))
    rounds = {**MACHINE, 'arithmetic': 'other'}
    draws = {**MACHINE, 'drawing': 'other'}
    assert not difference(of_numbers([numbers]), recorded, MACHINE, MACHINE)
    assert difference(near, recorded, MACHINE, MACHINE)
    assert not difference(near, recorded, rounds, MACHINE)
    assert difference(far, recorded, rounds, MACHINE)
    assert difference(near, recorded, draws, MACHINE)
    assert not difference(far, drawn, draws, MACHINE)
    assert 'b' in difference({'a': '1', 'b': '2'}, {'a': '1', 'b': '3'}, draws, MACHINE)
    assert difference(None, recorded, MACHINE, MACHINE)
    assert difference('1', None, MACHINE, MACHINE)
