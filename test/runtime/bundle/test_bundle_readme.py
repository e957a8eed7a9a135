"""engines/README.md describes the bundle format as the code has it."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from paths import ROOT
from tiny_policy import tiny_spec

from vla_runtime.bundle import schema as bundle_schema
from vla_runtime.bundle.rules import LIMITS, PREFIX_LIMIT, check_spec, dump_spec, parse_spec
from vla_runtime.bundle.schema import STATISTICS, STATISTICS_OF, BundleSpec
from vla_runtime.declarations.pi import PI05
from vla_runtime.family.dimensions import limits_of
from vla_runtime.family.listing import find_family
from vla_runtime.files.typed_yaml import key_of

README = (ROOT / 'engines' / 'README.md').read_text(encoding='utf-8')


def _keys_and_words(cls: type) -> Iterator[str]:
    """Every key of policy.yaml, and every word of a closed vocabulary."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        yield key_of(field)
        yield from _inside(hints[field.name])


def _inside(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif is_dataclass(hint):
        yield from _keys_and_words(hint)
    else:
        for inner in get_args(hint):
            yield from _inside(inner)


@pytest.mark.parametrize('name', sorted({*_keys_and_words(BundleSpec), 'format', *STATISTICS}))
def test_every_field_and_every_word_is_explained(name):
    assert re.search(rf'`[^`\n]*(?<![\w.]){re.escape(name)}(?![\w/])[^`\n]*`', README), name


@pytest.mark.parametrize(
    'name',
    [value for name, value in vars(bundle_schema).items() if name.endswith(('_FILE', '_FOLDER'))],
)
def test_every_file_is_listed(name):
    assert re.search(rf'^\| `{re.escape(name)}/?` \|', README, re.MULTILINE)


def test_every_normaliser_is_listed_with_what_it_reads():
    for kind, names in STATISTICS_OF.items():
        reads = ', '.join(f'`{name}`' for name in names) or 'nothing'
        assert f'| `{kind}` | {reads} |' in README


def test_sizes_and_limits_are_true():
    rows = dict(re.findall(r'^\| `(\w+)` \| .* \| ([^|]*) \| [^|]* \|$', README, re.MULTILINE))
    limits = dict(re.findall(r'^\| `(\w+)` \| .* \| [^|]* \| ([^|]*) \|$', README, re.MULTILINE))
    for stack in ('vision', 'language'):
        names = [field.name for field in fields(getattr(PI05, stack))]
        sizes = [getattr(getattr(PI05, stack), name) for name in names]
        assert sorted(map(int, rows[stack].split(', '))) == sorted(sizes)
        most = [limits_of(find_family('pi05').dims)[f'{stack}.{name}'] for name in names]
        assert list(map(int, limits[stack].split(', '))) == most
    for name in ('vocabulary', 'cameras', 'prompt_length', 'horizon', 'action_dim', 'state_dim'):
        assert int(rows[name]) == getattr(PI05, name)
        assert int(limits[name]) == LIMITS[f'dimensions.{name}']
    assert f'are {PREFIX_LIMIT} together at most' in README


def test_the_pose_written_by_hand_is_a_valid_one():
    written = yaml.safe_load(README.partition('```yaml\n')[2].partition('```')[0])
    spec = replace(tiny_spec(), dims=replace(tiny_spec().dims, action_dim=6))
    document = {**yaml.safe_load(dump_spec(spec)), **written}
    check_spec(parse_spec(yaml.safe_dump(document)))
