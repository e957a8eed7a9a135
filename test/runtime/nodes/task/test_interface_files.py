"""The files of `vla_interfaces` say what the code says, built or not."""

from __future__ import annotations

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml
from paths import ROOT

import vla_runtime
from vla_runtime.execution.command import Driver, LimitKind, Reason
from vla_runtime.execution.config import Mode
from vla_runtime.messages.trajectories import refuse_other_fields, typed_messages
from vla_runtime.nodes.task.progress import Outcome
from vla_runtime.recording.storage_file import message_types

PACKAGE = ROOT / 'interfaces' / 'vla_interfaces'
FILES = sorted(path for kind in ('msg', 'srv', 'action') for path in (PACKAGE / kind).iterdir())


def constants(file: str) -> dict[str, str]:
    text = (PACKAGE / file).read_text(encoding='utf-8')
    return dict(re.findall(r'^(?:string|uint8) ([A-Z_]+)=(\w+)$', text, re.MULTILINE))


def fields(text: str) -> dict[str, str]:
    """Names and types of the fields of one part of an interface."""
    return {name: kind for kind, name in re.findall(r'^([\w/\[\]]+) (\w+)$', text, re.MULTILINE)}


def test_words_are_those_of_the_code() -> None:
    assert set(constants('msg/BindingLimit.msg').values()) == {kind.value for kind in LimitKind}
    assert set(constants('msg/ExecutorState.msg').values()) == {
        'inactive',
        *(mode.value for mode in Mode),
        *(driver.value for driver in Driver),
    }
    outcomes = constants('action/RunPolicy.action')
    assert {one.name: str(one.value) for one in Outcome}.items() <= outcomes.items()
    text = (PACKAGE / 'msg/ExecutorState.msg').read_text(encoding='utf-8')
    named = re.findall(r'`(\w+)`', text)
    assert named and set(named) <= {reason.value for reason in Reason}


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.name)
def test_every_interface_is_built_and_every_field_is_explained(path: object) -> None:
    listed = re.findall(
        r'"((?:msg|srv|action)/\w+\.\w+)"', (PACKAGE / 'CMakeLists.txt').read_text()
    )
    assert sorted(listed) == sorted(str(one.relative_to(PACKAGE)) for one in FILES)
    text = path.read_text(encoding='utf-8')  # type: ignore[attr-defined]
    assert text.startswith('# ')
    assert all(len(line) <= 100 for line in text.splitlines())


def test_bags_are_read_with_the_same_fields_without_the_package() -> None:
    for path in (PACKAGE / 'msg').iterdir():
        kind = message_types().get_msgdef(f'vla_interfaces/msg/{path.stem}')
        known = [name for name, _ in kind.fields]
        assert known == list(fields(path.read_text(encoding='utf-8')))


def test_the_package_is_of_the_same_release_and_depends_on_what_it_uses() -> None:
    root = ElementTree.parse(PACKAGE / 'package.xml').getroot()
    assert root.findtext('version') == vla_runtime.__version__
    used = {
        kind.split('/')[0]
        for path in FILES
        for kind in fields(path.read_text(encoding='utf-8')).values()
        if '/' in kind
    }
    assert used == {one.text for one in root.findall('depend')}


def test_the_behaviour_tree_has_the_goals_fields_as_ports() -> None:
    tree = ElementTree.parse(ROOT / 'config' / 'behaviour_tree.xml').getroot()
    ports = {one.get('name') for one in tree.iter('input_port')}
    text = (PACKAGE / 'action' / 'RunPolicy.action').read_text(encoding='utf-8')
    goal = fields(text.split('\n---\n')[0])
    assert ports == {'action_name', *goal}
    for action in tree.find('BehaviorTree').iter('RunPolicy'):  # type: ignore[union-attr]
        assert set(action.attrib) <= ports


def test_the_lifecycle_manager_knows_both_nodes_and_waits_for_no_bond() -> None:
    document = yaml.safe_load((ROOT / 'config' / 'lifecycle_manager.yaml').read_text())
    given = document['lifecycle_manager']['ros__parameters']
    assert given['node_names'] == ['vla_policy', 'vla_executor']
    assert given['bond_timeout'] == 0.0


@pytest.mark.skipif(typed_messages() is None, reason='vla_interfaces is not built')
def test_messages_that_were_built_of_other_files_are_refused_by_their_field() -> None:
    built = typed_messages()
    fields = {**built.ExecutorState.get_fields_and_field_types(), 'elsewhere': 'string'}
    older = SimpleNamespace(get_fields_and_field_types=lambda: fields)
    module = {path.stem: getattr(built, path.stem) for path in (PACKAGE / 'msg').iterdir()}
    with pytest.raises(RuntimeError, match='elsewhere'):
        refuse_other_fields(SimpleNamespace(**{**module, 'ExecutorState': older}))
