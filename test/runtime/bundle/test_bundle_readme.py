"""engines/README.md describes the bundle format as the code has it."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from paths import ROOT
from tiny_policy import tiny_spec

from vla_convert.checkpoints.reader import _readers as checkpoint_readers
from vla_runtime.bundle import schema as bundle_schema
from vla_runtime.bundle.rules import LIMITS, PREFIX_LIMIT, check_spec, dump_spec, parse_spec
from vla_runtime.bundle.schema import STATISTICS, STATISTICS_OF, BundleSpec
from vla_runtime.families.pi.declaration import PI05
from vla_runtime.family.listing import family_names, find_family
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
        most = [find_family('pi05').limits[f'{stack}.{name}'] for name in names]
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


# --- words that are those of the families -----------------------------------------------------


def _row(field: str) -> str:
    """Meaning of a field, from its row of the tables."""
    (meaning,) = re.findall(rf'^\| `{re.escape(field)}` \| (.*) \|$', README, re.MULTILINE)
    return str(meaning)


def test_every_family_is_listed():
    listed = re.findall(r'`(\w+)`', _row('family'))
    assert sorted(listed) == sorted(family_names())


@pytest.mark.parametrize(
    'template', sorted({name for one in family_names() for name in find_family(one).templates})
)
def test_a_template_is_listed_with_its_families(template):
    (meaning,) = re.findall(
        rf'^\| (?:`template`)? ?\| `{template}` \| (.*) \|$', README, re.MULTILINE
    )
    named = re.split(r'famil(?:y|ies)', meaning)[-1]
    assert {name for name in family_names() if re.search(rf'\b{name}\b', named)} == {
        name for name in family_names() if template in find_family(name).templates
    }


def _policies() -> Iterator[tuple[str, str]]:
    """Family and padding of LeRobot's policies; of other folders a reader finds the padding."""
    for reader in checkpoint_readers():
        for policy in reader.lerobot:
            yield policy.family or policy.type, policy.images.padding


@pytest.mark.parametrize(('family', 'padding'), sorted({*_policies()}))
def test_a_padding_is_listed_with_its_families(family, padding):
    (clause,) = (one for one in _row('images.padding').split('; ') if f'`{padding}`' in one)
    title = re.split(r' \(|,', find_family(family).title)[0]
    behind = clause.partition(f'`{padding}`')[2].partition('`')[0]
    assert re.search(rf'\b{re.escape(title)}\b', behind), (family, clause)
