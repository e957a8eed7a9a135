"""What `vla_runtime demo` chooses for the person before anything starts."""

import argparse
import os

import pytest
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle import read_bundle
from vla_runtime.cli import demo


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


def test_onnx_runtime_gets_a_bundle_with_files_which_are_made_once(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    bundle = write_tiny_policy(tmp_path / 'plain', tiny_spec())

    def chosen(*more: str):
        words = ['--bundle', str(bundle), '--out', str(tmp_path / 'runs' / 'first'), *more]
        return demo._with_networks(demo._options(parser.parse_args(words))).bundle

    assert chosen() == bundle
    made = chosen('--backend', 'onnxruntime')
    assert made.parent == tmp_path / 'runs'
    assert 'onnx/expert.onnx' in read_bundle(made).spec.files
    assert 'exporting ONNX files' in capsys.readouterr().out
    assert chosen('--backend', 'onnxruntime') == made
    assert 'exporting' not in capsys.readouterr().out
