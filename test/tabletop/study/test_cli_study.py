"""The verb `study`."""

import argparse
import json
import sys

import pytest
from local_ray import local_cluster, needs_ray
from onnx_bundles import copy_bundle, reseal, tiny_onnx_bundle
from paths import ROOT

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.success import success_fault
from vla_runtime.bundle.writer import seal
from vla_runtime.cli.main import main
from vla_runtime.engines import devices
from vla_runtime.engines.candidates import INT8, reduced_precisions
from vla_runtime.files.package_files import code_version, source_digest
from vla_tabletop.cli import study as study_verb
from vla_tabletop.cli.study import _judge
from vla_tabletop.study import catalogue, runner
from vla_tabletop.study.catalogue import STUDIES, Study
from vla_tabletop.study.condition import Condition, grid
from vla_tabletop.study.episode import EpisodeResult
from vla_tabletop.study.results import Provenance
from vla_tabletop.study.runner import bundle_identity
from vla_tabletop.study.smoothness import Jerk


def test_it_lists_what_there_is(capsys):
    assert main(['study', '--list']) == 0
    printed = capsys.readouterr().out
    for study in STUDIES.values():
        assert study.name in printed and study.title in printed


def test_without_a_name_it_measures_the_demo_policy_wherever_it_is_called(tmp_path, monkeypatch):
    conditions = grid(Condition(chunk_source='expert'), replan_interval=(4, 8))
    study = Study('tiny', 'Tiny', '?', conditions, 'replan_interval', 1)
    monkeypatch.setitem(catalogue.STUDIES, 'tiny', study)
    monkeypatch.chdir(tmp_path)
    assert main(['study', 'tiny', '--processes', '1']) == 0
    record = json.loads((tmp_path / 'demo_runs' / 'study' / 'study_tiny.json').read_text())
    assert record['command'] == 'vla_runtime study tiny --episodes 1 --seed 0'


def test_it_runs_a_study_and_writes_its_results(tmp_path, capsys, monkeypatch, bundle_for_study):
    expert = Condition(chunk_source='expert')
    study = Study('tiny', 'Tiny', '?', grid(expert, replan_interval=(4, 8)), 'replan_interval', 20)
    monkeypatch.setitem(catalogue.STUDIES, 'tiny', study)
    arguments = ['study', 'tiny', '--bundle', str(bundle_for_study), '--episodes', '2']
    arguments += ['--processes', '1', '--seed', '4', '--out', str(tmp_path / 'out')]
    assert main([*arguments, '--work', str(tmp_path / 'work')]) == 0
    assert '2/2' in capsys.readouterr().out
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {
        'study_tiny.json',
        'study_tiny.csv',
        'study.html',
    }
    record = json.loads((tmp_path / 'out' / 'study_tiny.json').read_text())
    assert record['command'].endswith('--episodes 2 --seed 4')
    assert (record['code'], record['source_sha256']) == (code_version(), source_digest())
    page = tmp_path / 'out' / 'study.html'
    written = page.read_text()
    page.unlink()
    assert main(['study', '--page', '--out', str(tmp_path / 'out')]) == 0
    assert page.read_text() == written


@pytest.mark.thorough
def test_families_run_side_by_side_each_from_its_own_bundle(
    tmp_path, capsys, monkeypatch, untrained, untrained_act, bundle_for_study
):
    red = Condition(families=('colour',), colours=('red',), replan_interval=16)
    conditions = grid(red, policy_family=('pi05', 'act'))
    study = Study('tiny', 'Tiny', '?', conditions, 'policy_family', 1)
    monkeypatch.setitem(catalogue.STUDIES, 'tiny', study)
    arguments = ['study', 'tiny', '--processes', '1', '--out', str(tmp_path / 'out')]
    arguments += ['--work', str(tmp_path / 'work'), '--bundle', str(untrained)]
    assert main([*arguments, '--bundle', str(bundle_for_study)]) == 2
    assert 'takes one bundle of each of pi05, act' in capsys.readouterr().err
    assert main([*arguments, '--bundle', str(untrained_act)]) == 0
    record = json.loads((tmp_path / 'out' / 'study_tiny.json').read_text())
    names = [read_bundle(bundle).spec.name for bundle in (untrained, untrained_act)]
    assert record['bundle'] == '; '.join(names)
    digests = [bundle_identity(bundle) for bundle in (untrained, untrained_act)]
    assert record['bundle_sha256'].split() == digests
    page = (tmp_path / 'out' / 'study.html').read_text()
    assert all(digest[:12] in page for digest in digests)
    pi05, act = (condition['episodes'][0] for condition in record['conditions'])
    assert pi05[0] == act[0] and pi05[-1] != act[-1]  # one seed, two trajectories


def test_a_study_of_one_policy_refuses_a_second_bundle(capsys, untrained, untrained_act):
    bundles = ['--bundle', str(untrained), '--bundle', str(untrained_act)]
    assert main(['study', 'success', *bundles]) == 2
    assert 'study success runs one policy, not 2' in capsys.readouterr().err


def test_a_condition_that_the_policy_cannot_run_is_refused_before_any_is_run(
    tmp_path, capsys, monkeypatch, untrained_act
):
    monkeypatch.setattr(runner, '_run_batch', lambda task: pytest.fail('it ran'))
    guided = Study('guided', 'Guided', '?', grid(Condition(), beta=(None, 2.0)), 'beta', 1)
    monkeypatch.setitem(catalogue.STUDIES, 'guided', guided)
    words = ['--out', str(tmp_path / 'out'), '--work', str(tmp_path / 'work'), '--processes', '1']
    assert main(['study', 'guided', '--bundle', str(untrained_act), *words]) == 2
    printed = capsys.readouterr().err
    assert str(untrained_act) in printed and 'cfg_beta' in printed


@needs_ray
def test_a_cluster_gives_the_results_of_one_process(tmp_path, monkeypatch, untrained):
    conditions = grid(Condition(), replan_interval=(4, 8))
    study = Study('tiny', 'Tiny', '?', conditions, 'replan_interval', 6)
    monkeypatch.setitem(catalogue.STUDIES, 'tiny', study)
    records = []
    with local_cluster(tmp_path, ROOT) as addresses:
        for words in (['--processes', '1'], ['--ray', addresses.member]):
            out = tmp_path / words[0].strip('-')
            folders = ['--out', str(out), '--work', str(tmp_path / f'work of {out.name}')]
            assert main(['study', 'tiny', '--bundle', str(untrained), *words, *folders]) == 0
            records.append((out / 'study_tiny.json').read_text())
    assert records[0] == records[1]


def test_processes_of_a_cluster_that_was_there_before_are_refused(tmp_path, capsys, untrained):
    words = ['study', 'success', '--bundle', str(untrained), '--ray', 'host:1', '--processes', '2']
    folders = ['--out', str(tmp_path / 'out'), '--work', str(tmp_path / 'work')]
    assert main([*words, *folders]) == 2
    assert '--processes with --ray host:1: the cluster places the work itself' in (
        capsys.readouterr().err
    )


def test_a_cluster_without_ray_is_refused_before_anything_runs(
    tmp_path, capsys, monkeypatch, untrained
):
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, 'ray', None)
    words = ['study', 'success', '--bundle', str(untrained), '--ray', 'auto']
    folders = ['--out', str(tmp_path / 'out'), '--work', str(tmp_path / 'work')]
    assert main([*words, *folders]) == 2
    told = capsys.readouterr()
    assert "--ray needs the Python package 'ray'" in told.err
    # Neither the study's title nor a bar.
    assert told.out == '' and len(told.err.splitlines()) == 1


@pytest.fixture
def bundle_for_study(tmp_path):
    from tiny_policy import tiny_spec, write_tiny_policy

    return write_tiny_policy(tmp_path / 'bundle', tiny_spec())


def episode(seed: int, success: bool) -> EpisodeResult:
    return EpisodeResult(
        seed=seed,
        family='colour',
        outcome='success' if success else 'timeout',
        touched=0 if success else None,
        meant=0,
        steps=40.0,
        inferences=5,
        refused=0,
        delay_steps=1.0,
        starved_ticks=0,
        position_jump=0.0,
        velocity_jump=0.0,
        jerk=Jerk(0.0, 0.0, 0.0),
        halted='',
    )


@pytest.mark.parametrize('bad', ['', 'int8'])
def test_8_bits_are_judged_pair_by_pair_and_the_receipt_says_so(tmp_path, capsys, monkeypatch, bad):
    monkeypatch.setattr(devices, 'cpu_flags', lambda: {'avx_vnni'})
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'bundle')
    graphs = bundle / 'onnx' / 'graphs.json'
    graphs.write_text(json.dumps(json.loads(graphs.read_text()) | {'precision': 'int8'}))
    reseal(bundle)
    spec = read_bundle(bundle).spec
    (bundle / 'verification.json').write_text(json.dumps({'onnx': {'precision': 'int8'}}))
    seal(bundle, spec)
    study = STUDIES['eight_bits']
    results = {
        one: [
            episode(seed, not (one.precision == bad and one.variant == 'moving' and seed < 20))
            for seed in range(200)
        ]
        for one in study.conditions
    }
    provenance = Provenance('vla_runtime study eight_bits', 'tiny', '', (0, 200), 'code', 'source')
    arguments = argparse.Namespace(bundle=[bundle], work=tmp_path / 'work')
    _judge(study, results, bundle, arguments, provenance)
    printed = capsys.readouterr().out
    receipt = json.loads((bundle / 'verification.json').read_text())['judged']
    lost = 20 if bad else 0
    judged = receipt['onnxruntime']['int8']
    assert [
        (one['condition'], one['episodes'], one['succeeded'], one['lost'])
        for one in judged['conditions']
    ] == [('still', 200, 200, 0), ('moving', 200, 200 - lost, lost)]
    assert judged['command'] == 'vla_runtime study eight_bits'
    said = 'auto leaves it out: moving' if lost else 'success was kept'
    assert f'int8 of onnxruntime: {said}' in printed
    assert bool(success_fault(read_bundle(bundle), 'onnxruntime', 'int8')) == bool(lost)
    assert bool(reduced_precisions(read_bundle(bundle), 'cpu')[INT8]) == (bad == 'int8')


@pytest.mark.parametrize('flags', [set(), {'avx_vnni'}])
def test_without_instructions_for_int8_the_other_studies_run(
    tmp_path, capsys, monkeypatch, untrained, flags
):
    monkeypatch.setattr(devices, 'cpu_flags', lambda: flags)
    bundle = copy_bundle(untrained, tmp_path / 'bundle')
    asked = []

    def run_conditions(conditions, bundles, seeds, work, pool):
        asked.extend(conditions)
        return {one: [episode(seed, True) for seed in seeds] for one in conditions}

    monkeypatch.setattr(runner, 'run_conditions', run_conditions)
    monkeypatch.setattr(runner, 'bundle_of', lambda condition, bundle, work: bundle)
    monkeypatch.setattr(study_verb, '_write_page', lambda folder: folder / 'study.html')
    folders = ['--out', str(tmp_path / 'out'), '--work', str(tmp_path / 'work')]
    rest = ['--episodes', '200', '--bundle', str(bundle), *folders]
    assert main(['study', 'eight_bits', 'precision', *rest]) == 0
    printed = capsys.readouterr().out
    judged = json.loads((bundle / 'verification.json').read_text())['judged']
    others = STUDIES['precision'].conditions
    if flags:
        assert tuple(asked) == (*STUDIES['eight_bits'].conditions, *others)
        assert 'left out' not in printed and set(judged) == {'torch', 'onnxruntime'}
        return
    assert tuple(asked) == others and list(judged) == ['torch']
    assert 'eight_bits is left out' in printed and 'VNNI' in printed
    # Named alone, nothing is left.
    assert main(['study', 'eight_bits', *rest]) == 2
    assert tuple(asked) == others


def test_a_short_trial_leaves_the_receipt_alone(tmp_path, capsys, untrained):
    bundle = copy_bundle(untrained, tmp_path / 'bundle')
    before = (bundle / 'policy.yaml').read_bytes()
    study = STUDIES['precision']
    results = {one: [episode(seed, True) for seed in range(199)] for one in study.conditions}
    provenance = Provenance('vla_runtime study precision', 'demo', '', (0, 199), 'code', 'source')
    arguments = argparse.Namespace(bundle=[bundle], work=tmp_path)
    _judge(study, results, bundle, arguments, provenance)
    printed = capsys.readouterr().out
    assert printed.count('no receipt is written: fewer than 200 episodes a condition') == 2
    assert (bundle / 'policy.yaml').read_bytes() == before


def test_a_policy_that_was_not_named_keeps_its_receipt(tmp_path, capsys):
    study = STUDIES['eight_bits']
    results = {one: [episode(0, True)] for one in study.conditions}
    provenance = Provenance('vla_runtime study eight_bits', 'demo', '', (0, 1), 'code', 'source')
    arguments = argparse.Namespace(bundle=None, work=tmp_path)
    # The folder is not even looked at.
    _judge(study, results, tmp_path / 'shipped', arguments, provenance)
    assert 'name the policy with --bundle' in capsys.readouterr().out
