"""Runs of a work folder are remembered, one that was cut off included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vla_tabletop.training.start import WorkLog


@pytest.mark.parametrize('text', ['5', 'null', '{"a": 1}', '"abc"', '["abc"]', '[' * 100_000])
def test_a_damaged_log_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / 'runs.json'
    path.write_text(text, encoding='utf-8')
    with pytest.raises(ValueError, match=r'runs\.json: '):
        WorkLog(path, 'command', 'abc')


def test_a_run_that_was_cut_off_stays_in_the_log_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / 'runs.json'
    with pytest.raises(KeyboardInterrupt), WorkLog(path, 'first', 'abc').timed('data'):
        raise KeyboardInterrupt
    log = WorkLog(path, 'second', 'abc-dirty')
    with log.timed('data'):
        pass
    with log.timed('training'):
        pass
    first, second = json.loads(path.read_text())
    assert first.keys() == {'command', 'code', 'data_seconds'}
    assert second.keys() == {'command', 'code', 'data_seconds', 'training_seconds'}
    assert (second['command'], second['code']) == ('second', 'abc-dirty')
    assert log.runs == [first, second]
