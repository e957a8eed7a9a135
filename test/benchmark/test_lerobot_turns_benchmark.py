"""benchmark/lerobot_turns.py: figures, targets and refusals; LeRobot and a GPU are not needed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / 'benchmark'))

import lerobot_bundles
import lerobot_checkpoint
import lerobot_record
import lerobot_sides
import lerobot_turns
import lerobot_worker
from lerobot_sides import Turn

PYTHON = ['--lerobot-python', sys.executable]
EAGER, DEFAULT, TUNED = (f'lerobot bfloat16{mode}' for mode in ('', ' default', ' max-autotune'))


def figures(milliseconds, ours=('torch bfloat16',), rounds=2):
    """Figures of the same turn in every round; our chunk is 0.5 beside LeRobot's 2."""
    theirs = [name for name in milliseconds if name.startswith('lerobot')]
    record = lerobot_record.Record(theirs, ours)
    for _ in range(rounds):
        record.add(
            {
                name: Turn(np.full((2, 3), 2.0 if name in theirs else 1.5), ms, 2 * ms)
                for name, ms in milliseconds.items()
            }
        )
    return record.figures()


def targets(sides, family, found):
    return lerobot_record.targets(lerobot_record.GOALS[sides][family], found)


def test_figures_are_ratios_by_turns_and_chunk_differences():
    found = figures({'lerobot': 100.0, EAGER: 50.0, 'torch bfloat16': 10.0})
    ours = found['torch bfloat16']
    assert found['rounds'] == 2
    assert ours['ratio_by_turns'] == pytest.approx(0.1)
    assert ours[f'of {EAGER}']['ratio_by_turns'] == pytest.approx(0.2)
    assert ours['largest_relative_difference'] == pytest.approx(0.25)
    assert found[EAGER]['largest_relative_difference'] == 0.0


def test_the_gpu_targets_compare_with_eager_and_with_the_faster_compiled():
    milliseconds = {'lerobot': 400.0, EAGER: 100.0, DEFAULT: 30.0, TUNED: 25.0}
    eager, compiled = targets('cuda', 'pi05', figures({**milliseconds, 'torch bfloat16': 15.0}))
    assert eager.found == pytest.approx(0.15)
    assert eager.line == 'bfloat16, of LeRobot eager: 0.15 (at most 0.167): met'
    assert compiled.found == pytest.approx(0.6)
    assert compiled.line.endswith('0.6 (at most 0.5): NOT MET')


def test_the_gpu_targets_are_judged_on_the_faster_of_ours():
    milliseconds = {'lerobot': 400.0, EAGER: 100.0, DEFAULT: 30.0, TUNED: 25.0}
    ours = {'torch bfloat16': 30.0, 'torch bfloat16 triton': 10.0}
    found = targets('cuda', 'pi05', figures({**milliseconds, **ours}, ours=tuple(ours)))
    assert [one.found for one in found] == pytest.approx([0.1, 0.4])


class Loaded:
    """A policy of which only what it runs, and why, is asked."""

    def __init__(self, triton: str, why: str = '') -> None:
        self.triton, self.why, self.closed = triton, why, False

    def close(self) -> None:
        self.closed = True


def test_every_column_on_a_gpu_runs_another_engine_and_a_refused_one_is_left_out(monkeypatch):
    assert len(set(lerobot_sides.OURS['cuda'].values())) == 3
    assert lerobot_sides.OURS['cuda']['torch bfloat16 triton'].triton == 'on'
    plain, taken = Loaded('off'), Loaded('on')
    names = ('torch bfloat16', 'torch bfloat16 triton')
    both = dict(zip(names, (plain, taken), strict=True))
    assert lerobot_bundles.without_refused(both, 'cuda') == (both, {})
    refused = Loaded('off', 'a layer differs by 1')
    kept, why = lerobot_bundles.without_refused({**both, names[1]: refused}, 'cuda')
    assert kept == {names[0]: plain} and refused.closed and not plain.closed
    assert why == {names[1]: 'a layer differs by 1'}


def test_a_compiled_side_that_is_missing_leaves_the_other_and_without_both_nothing():
    one = figures({'lerobot': 400.0, EAGER: 100.0, DEFAULT: 30.0, 'torch bfloat16': 15.0})
    assert targets('cuda', 'pi05', one)[1].found == pytest.approx(0.5)
    none = figures({'lerobot': 400.0, EAGER: 100.0, 'torch bfloat16': 15.0})
    assert 'not measured' in targets('cuda', 'pi05', none)[1].line


def test_the_cpu_targets_take_the_fastest_of_ours():
    milliseconds = {'torch float32': 80.0, 'onnxruntime float32': 70.0, 'auto': 30.0}
    found = figures({'lerobot': 100.0, **milliseconds}, ours=tuple(milliseconds))
    assert [one.found for one in targets('cpu', 'act', found)] == pytest.approx([0.7, 0.3])
    hit = {'torch float32': 80.0, 'torch float32 hit': 9.0}
    found = figures({'lerobot': 100.0, EAGER: 60.0, **hit}, ours=('torch float32',))
    assert [one.found for one in targets('cpu', 'pi05', found)[:2]] == pytest.approx([0.8, 0.09])


def test_float32_meets_no_target_of_16_or_8_bits():
    milliseconds = {'torch float32': 20.0, 'auto': 20.0}
    found = figures({'lerobot': 100.0, EAGER: 800.0, **milliseconds}, ours=tuple(milliseconds))
    assert 'not measured' in targets('cpu', 'pi05', found)[-1].line
    milliseconds |= {'torch bfloat16': 400.0, 'onnxruntime int8': 200.0}
    found = figures({'lerobot': 100.0, EAGER: 800.0, **milliseconds}, ours=tuple(milliseconds))
    assert targets('cpu', 'pi05', found)[-1].found == pytest.approx(0.25)


def test_every_goal_names_columns_that_are_measured():
    for sides, families in lerobot_record.GOALS.items():
        ours = set(lerobot_sides.OURS[sides])
        for family, goals in families.items():
            for goal in goals:
                assert ours & {name.removesuffix(' hit') for name in goal.ours}
                assert set(goal.theirs) <= set(lerobot_sides.THEIRS[sides][family])


def test_show_says_each_target_and_what_was_left_out(capsys):
    found = figures({'lerobot': 400.0, EAGER: 100.0, 'torch bfloat16': 15.0})
    found['left_out'] = {TUNED: 'RuntimeError: no compiler'}
    found['targets'] = [one._asdict() for one in targets('cuda', 'pi05', found)]
    lerobot_record.show(found, ['torch bfloat16'])
    lines = capsys.readouterr().out.splitlines()
    assert f'left out: {TUNED}: RuntimeError: no compiler' in lines
    assert next(line for line in lines if line.startswith('target: ')).endswith('met')


@pytest.mark.parametrize(
    ('arguments', 'columns'),
    [
        (['act'], ['torch float32', 'onnxruntime float32', 'torch bfloat16', 'auto']),
        (['pi05'], list(lerobot_sides.OURS['cpu'])),
        (['act', '--device', 'cuda'], ['torch float32', 'torch bfloat16']),
        (['smolvla', '--device', 'cuda'], list(lerobot_sides.OURS['cuda'])),
        (['pi05', '--device', 'cuda'], ['torch bfloat16', 'torch bfloat16 triton']),
    ],
)
def test_columns_of_a_family_on_a_device(arguments, columns):
    assert lerobot_turns.parse_arguments([*arguments, *PYTHON]).ours == columns


def test_pi05_has_its_published_size_on_a_gpu_and_the_middle_one_on_a_cpu():
    for device, size, name in (('cuda', 'published', 'pi05_published'), ('cpu', 'mid', 'pi05')):
        arguments = lerobot_turns.parse_arguments(['pi05', '--device', device, *PYTHON])
        options = lerobot_turns.folder_options(arguments, Path('/work'))
        assert (options.size, options.device, Path(options.folder).name) == (size, device, name)


def test_a_column_of_the_other_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        lerobot_turns.parse_arguments(
            ['act', '--device', 'cuda', '--ours', 'onnxruntime int8', *PYTHON]
        )
    assert "--ours 'onnxruntime int8' is none of torch float32" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        lerobot_turns.parse_arguments(['act', '--theirs', 'lerobot tf32', *PYTHON])
    assert "--theirs 'lerobot tf32' is none of lerobot" in capsys.readouterr().err


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lerobot_turns, 'device_fault', lambda device: f'no {device} here')
    assert lerobot_turns.main(['pi05', '--device', 'cuda', *PYTHON]) == 2
    assert capsys.readouterr().err == 'error: no cuda here\n'


def test_a_lerobot_that_sees_no_gpu_is_told_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(lerobot_turns, 'device_fault', lambda device: '')
    fault = '--lerobot-python P: its PyTorch sees no GPU'
    monkeypatch.setattr(lerobot_turns, 'lerobot_fault', lambda python, device: fault)
    assert lerobot_turns.main(['pi05', '--device', 'cuda', *PYTHON]) == 2
    assert capsys.readouterr().err == f'error: {fault}\n'
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert lerobot_worker.device_fault('cuda').endswith('sees no GPU')
    assert lerobot_worker.device_fault('cpu') == ''


def test_a_python_that_is_missing_or_lacks_pytorch_is_told(tmp_path):
    missing = lerobot_sides.lerobot_fault(tmp_path / 'python', 'cpu')
    assert missing.endswith('python: No such file or directory')
    broken = tmp_path / 'broken'
    broken.write_text('#!/bin/sh\necho "ModuleNotFoundError: no torch" >&2\nexit 1\n')
    broken.chmod(0o755)
    assert lerobot_sides.lerobot_fault(broken, 'cpu').endswith('ModuleNotFoundError: no torch')


def fake_lerobot(folder, *answers):
    """A Python that answers so, one line a request after the first."""
    script = folder / 'python'
    reads = '\n'.join(f"read line; echo '{json.dumps(one)}'" for one in answers[1:])
    script.write_text(f"#!/bin/sh\necho '{json.dumps(answers[0])}'\n{reads}\n")
    script.chmod(0o755)
    return script


def options(folder):
    return lerobot_checkpoint.Options('pi05', 'tiny', str(folder), '', 'cpu')


def test_a_side_that_cannot_be_compiled_is_left_out_and_named(tmp_path):
    python = fake_lerobot(tmp_path, {'versions': {}}, {'error': 'RuntimeError: no compiler'})
    columns = {'lerobot': ('float32', ''), DEFAULT: ('bfloat16', 'default')}
    arrays = {'state': np.zeros(2)}
    sides, left_out = lerobot_turns.start_lerobot(python, options(tmp_path), columns, arrays)
    for side in sides.values():
        side.close()
    assert list(sides) == ['lerobot']
    assert left_out == {DEFAULT: 'RuntimeError: no compiler'}


def test_graphs_compiled_while_rounds_counted_are_recorded(tmp_path):
    np.save(tmp_path / 'chunk.npy', np.zeros((2, 3)))
    turn = {'ms': 1.0, 'cpu_ms': 1.0, 'peak_memory_gib': 8.0}
    answers = [{**turn, 'graphs': number} for number in (3, 0, 1)]
    side = lerobot_sides.LeRobot(
        fake_lerobot(tmp_path, {'versions': {}}, *answers), options(tmp_path)
    )
    for _ in answers:
        side.infer({'state': np.zeros(2)})
    side.close()
    found = lerobot_turns.compiled_graphs({'lerobot': side}, rounds=2)
    assert found == {'lerobot': {'all': 4, 'in_counted_rounds': 1}}
    assert side.peak_memory_gib == 8.0


def test_options_reach_the_worker_whole(tmp_path):
    given = options(tmp_path)
    assert lerobot_checkpoint.Options(**json.loads(json.dumps(asdict(given)))) == given


def test_matrices_of_zeros_are_drawn_and_biases_and_others_stay():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    torch.nn.init.zeros_(module[0].weight)
    torch.nn.init.zeros_(module[0].bias)
    kept = module[1].weight.clone()
    lerobot_checkpoint.draw_constants(module)
    assert module[0].weight.count_nonzero() == 12
    assert not module[0].bias.any()
    assert torch.equal(module[1].weight, kept)
