"""Choices of `vla_runtime demo` before anything starts."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest
from onnx_bundles import make_exports_once
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy

from vla_convert.export.onnx.bundle import export_bundle
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.files.cache_folder import cache_folder
from vla_tabletop.cli import demo
from vla_tabletop.demo import session
from vla_tabletop.demo.options import DemoOptions, check_options
from vla_tabletop.demo.session import DemoResult


def prepared(monkeypatch, **given: str) -> dict[str, str]:
    environment = dict(given)
    monkeypatch.setattr(os, 'environ', environment)
    demo._prepare_environment()
    return environment


def test_it_stays_on_this_machine(monkeypatch):
    environment = prepared(monkeypatch, ROS_DISTRO='jazzy')
    assert environment['ROS_AUTOMATIC_DISCOVERY_RANGE'] == 'LOCALHOST'
    assert 'ROS_LOCALHOST_ONLY' not in environment
    assert environment['FASTRTPS_DEFAULT_PROFILES_FILE'].endswith('fastdds.xml')


def test_humble_is_told_in_the_way_that_it_knows(monkeypatch):
    assert prepared(monkeypatch, ROS_DISTRO='humble')['ROS_LOCALHOST_ONLY'] == '1'


@pytest.mark.parametrize(
    'chosen', [{'ROS_LOCALHOST_ONLY': '0'}, {'ROS_AUTOMATIC_DISCOVERY_RANGE': 'SUBNET'}]
)
def test_what_the_person_has_chosen_stays(monkeypatch, chosen):
    environment = prepared(monkeypatch, ROS_DISTRO='humble', **chosen)
    assert {name: environment[name] for name in chosen} == chosen


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """The bundle that the demo runs, in a working folder and with a cache of the test's own."""
    make_exports_once(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)

    def run(bundle: Path, out: str, backend: str = 'onnxruntime') -> Path:
        words = ['--bundle', str(bundle), '--out', out, '--backend', backend]
        return demo._with_networks(demo._options(parser.parse_args(words))).bundle

    return run


def test_a_backend_is_refused_where_a_server_has_one(tmp_path):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    words = ['--bundle', 'ws://127.0.0.1:9', '--out', str(tmp_path / 'out')]
    assert demo._options(parser.parse_args(words)).server is not None
    with pytest.raises(ValueError, match='--backend'):
        demo._options(parser.parse_args([*words, '--backend', 'torch']))


def test_onnx_runtime_gets_a_bundle_with_files_which_are_made_once(tmp_path, chosen, capsys):
    bundle = write_tiny_policy(tmp_path / 'plain', tiny_spec())
    assert chosen(bundle, 'first', 'torch') == bundle
    made = chosen(bundle, 'runs/first')
    assert made.parent == tmp_path / 'cache' / 'vla_runtime'
    assert 'onnx/expert.onnx' in read_bundle(made).spec.files
    assert 'exporting ONNX files' in capsys.readouterr().out
    # Wherever the run goes; and nothing lies beside it.
    assert chosen(bundle, 'elsewhere/second') == made
    assert 'exporting' not in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {'plain', 'cache'}


@pytest.mark.thorough
def test_a_damaged_or_half_made_copy_is_made_again(tmp_path, chosen, capsys):
    bundle = write_tiny_policy(tmp_path / 'plain', tiny_spec())
    made = chosen(bundle, 'run')

    def changed() -> None:
        data = bytearray((made / 'onnx' / 'weights.data').read_bytes())
        data[-1] ^= 1
        (made / 'onnx' / 'weights.data').write_bytes(data)

    for damage in (changed, (made / 'onnx' / 'expert.onnx').unlink, (made / 'policy.yaml').unlink):
        damage()
        capsys.readouterr()
        assert chosen(bundle, 'run') == made
        assert 'exporting ONNX files' in capsys.readouterr().out
        read_bundle(made)
    assert list(made.parent.iterdir()) == [made], 'nothing of it is left behind'


def test_a_copy_that_another_demo_finished_first_is_used(tmp_path, chosen, monkeypatch):
    def late(*arguments, **options):
        export_bundle(*arguments, **options)
        return export_bundle(*arguments, **options)

    bundle = write_tiny_policy(tmp_path / 'plain', tiny_spec())
    monkeypatch.setattr('vla_convert.export.onnx.bundle.export_bundle', late)
    read_bundle(chosen(bundle, 'run'))


def test_a_policy_with_the_same_weights_that_acts_otherwise_gets_a_copy_of_its_own(
    tmp_path, chosen
):
    bundle = write_tiny_policy(tmp_path / 'plain', tiny_spec())
    first = chosen(bundle, 'run')
    seal(bundle, replace(read_bundle(bundle).spec, denoise_steps=5))
    second = chosen(bundle, 'run')
    assert read_bundle(first).spec.denoise_steps == 3
    assert read_bundle(second).spec.denoise_steps == 5


def test_the_cache_is_at_home_where_nothing_else_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    for nothing in ('', 'relative/folder'):
        monkeypatch.setenv('XDG_CACHE_HOME', nothing)
        assert cache_folder() == tmp_path / '.cache' / 'vla_runtime'


@pytest.mark.parametrize(('inferences', 'code'), [(0, 1), (1, 0)])
def test_a_policy_that_sent_no_chunk_is_an_error_that_names_its_log(
    inferences, code, tmp_path, monkeypatch, capsys
):
    result = DemoResult(seconds=10.0)
    result.telemetry.inferences += [None] * inferences
    monkeypatch.setattr(session, 'run_session', lambda *arguments: result)
    monkeypatch.setattr(demo, '_report', lambda *arguments: None)
    monkeypatch.setattr(demo, '_prepare_environment', lambda: None)
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    out = tmp_path / 'out'
    assert demo.main(parser.parse_args(['--out', str(out)])) == code
    said = f'error: the policy sent no chunk; {out / "log" / "policy.log"} says why'
    assert (said in capsys.readouterr().err) == (inferences == 0)


with_demo = pytest.mark.skipif(
    not (ROOT / 'engines' / 'demo' / 'policy.yaml').is_file(), reason='no engines/demo here'
)


def options(out: Path, backend: str = 'torch') -> DemoOptions:
    return DemoOptions(
        seconds=1.0,
        out=out,
        bundle=ROOT / 'engines' / 'demo',
        robot='tabletop',
        backend=backend,
        replan_interval=None,
        cfg_beta=None,
        seed=0,
        namespace='',
    )


@with_demo
@pytest.mark.parametrize('left', ['bag', 'report.html', 'parameters.yaml'])
def test_a_folder_of_an_earlier_demo_is_refused_whatever_is_left_of_it(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / left).write_text('earlier')
    with pytest.raises(ValueError, match='--out'):
        check_options(options(tmp_path))
    assert (tmp_path / left).read_text() == 'earlier'


@with_demo
def test_the_choice_of_a_backend_may_be_left_to_the_machine(tmp_path: Path) -> None:
    check_options(options(tmp_path, 'auto'))
    with pytest.raises(ValueError, match="'jax'"):
        check_options(options(tmp_path, 'jax'))
