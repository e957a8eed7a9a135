"""Strict YAML and settings: what is said becomes a dataclass or an error with the field's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import tiny_spec

from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.free_text import FreeText
from vla_runtime.files.setting_fields import (
    check_settings,
    from_values,
    setting,
    settings_of,
    values_of,
)
from vla_runtime.files.typed_yaml import dumps, loads, parse


@dataclass(frozen=True)
class Wheel:
    radius_m: float
    spokes: int = 0


@dataclass(frozen=True)
class Cart:
    """One field of every kind that a file can have."""

    name: str
    wheels: tuple[Wheel, ...]
    size_m: tuple[float, float]
    gears: int = field(metadata={'key': 'number_of_gears'})
    colour: Literal['red', 'blue'] = 'red'
    electric: bool = False
    owner: str | None = None
    labels: Mapping[str, FreeText] | None = None


WHEELS = (Wheel(0.5, 8), Wheel(0.25))
CART = Cart('c', WHEELS, (1.0, 2.0), 3, 'blue', True, 'me', {'back': ' a\n b '})


def test_a_dataclass_survives_the_way_through_yaml():
    assert parse(Cart, loads(dumps(CART))) == CART


def test_a_field_may_be_written_under_another_key():
    assert 'number_of_gears: 3' in dumps(CART)


def test_what_has_a_default_may_be_left_out():
    text = 'name: c\nwheels: [{radius_m: 1}]\nsize_m: [1, 2]\nnumber_of_gears: 1'
    assert parse(Cart, loads(text)) == Cart('c', (Wheel(1.0),), (1.0, 2.0), 1)


@pytest.mark.parametrize(
    ('old', 'new', 'field_name', 'message'),
    [
        ('spokes: 8', 'spokes: -1', 'wheels[0].spokes', '-1 where at least 0'),
        ('spokes: 8', 'spokes: 99999999999', 'wheels[0].spokes', 'where at most 2147483647'),
        ('0.25', '1e999', 'wheels[1].radius_m', 'inf where a finite number is expected'),
        ('0.25', '-.inf', 'wheels[1].radius_m', '-inf where a finite number'),
        ('0.25', '1' + '0' * 400, 'wheels[1].radius_m', 'where at most'),
        ('0.25', '-1e308', 'wheels[1].radius_m', '-1e+308 where at least -2147483647 is expected'),
        ('0.25', '1e308', 'wheels[1].radius_m', '1e+308 where at most 2147483647 is expected'),
        ('0.25', 'yes', 'wheels[1].radius_m', 'true where a number'),
        ('[1.0, 2.0]', '[1.0]', 'size_m', '1 entries where 2 are expected'),
        ('[1.0, 2.0]', '{a: 1}', 'size_m', 'a mapping where a list'),
        ('true', '1', 'electric', '1 (int) where true or false'),
        ('blue', 'green', 'colour', "'green' is unknown; expected one of red, blue"),
        ('blue', '[blue]', 'colour', 'a list where one of red, blue'),
        ('name: c', 'name: "a\\nb"', 'name', 'characters that cannot be printed'),
        ('name: c', 'name: " c"', 'name', 'spaces around it'),
        ('name: c', 'name: 2026-11-20', 'name', 'put it in quotes'),
        ('owner: me', 'owner: [me]', 'owner', 'a list where text is expected'),
        ('owner: me', '5: me', '5', 'unknown key'),
        (r'" a\n b "', '5', 'labels.back', 'put it in quotes'),
        (r'" a\n b "', r'"a\0"', 'labels.back', 'has characters that cannot be printed'),
    ],
)
def test_a_value_that_does_not_fit_is_named(old, new, field_name, message):
    text = dumps(CART)
    assert old in text
    with pytest.raises(FieldError) as caught:
        parse(Cart, loads(text.replace(old, new)))
    assert caught.value.field == field_name
    assert message in caught.value.message


@pytest.mark.parametrize(
    'text',
    [
        'a: 1\na: 2',
        '[' * 5000,
        '!!python/name:os.system',
        'a: !cart {}',
        '\t',
        '\x00',
        '? [a]\n: 1',
    ],
)
def test_what_is_no_plain_yaml_is_refused(text):
    with pytest.raises(FieldError):
        parse(Cart, loads(text))


VALUES = [
    '',
    '5',
    '-1',
    '0.5',
    '.nan',
    'null',
    'true',
    '[]',
    '{}',
    '[x]',
    '{x: 1}',
    "'1'",
    '*a',
    '&a',
]


@st.composite
def damaged(draw: Callable) -> str:
    """A policy.yaml after a slip of the hand: lines lost, doubled, swapped; values replaced."""
    lines = dump_spec(tiny_spec('pi05', delta=True)).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        slip = draw(st.sampled_from(['lose', 'double', 'swap', 'value', 'inner', 'letter']))
        if slip == 'lose' and len(lines) > 1:
            del lines[at]
        elif slip == 'double':
            lines.insert(at, lines[at])
        elif slip == 'swap':
            lines[at], lines[at - 1] = lines[at - 1], lines[at]
        elif slip == 'value':
            lines[at] = lines[at].partition(':')[0] + ': ' + draw(st.sampled_from(VALUES))
        elif slip == 'inner':
            parts = lines[at].split(', ')
            index = draw(st.integers(0, len(parts) - 1))
            parts[index] = parts[index].partition(':')[0] + ': ' + draw(st.sampled_from(VALUES))
            lines[at] = ', '.join(parts)
        elif lines[at]:
            index = draw(st.integers(0, len(lines[at]) - 1))
            letter = draw(st.characters(codec='utf-8'))
            lines[at] = lines[at][:index] + letter + lines[at][index + 1 :]
    return '\n'.join(lines)


@given(damaged())
def test_no_slip_of_the_hand_gets_past_the_field_error(text):
    try:
        assert isinstance(parse_spec(text), BundleSpec)
    except FieldError as error:
        assert error.message


ALIASES = ''.join(f'a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n' for n in range(40))
MERGES = ''.join(f'a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}, *a{n}]}}\n' for n in range(20))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('a: {<<: {b: 1}}', "line 1, column 5: merge keys ('<<') are not read; write the keys out"),
        (f'a0: &a0 {{x: 1}}\n{MERGES}', 'more than 20000 values'),
        (f'a0: &a0 [x, x]\n{ALIASES}', 'more than 20000 values'),
        ('a: &a [*a]', "alias 'a' stands for itself"),
        ('a: !!int ""', "tag 'tag:yaml.org,2002:int': write the value without a tag"),
        ('a: !!bool x', "tag 'tag:yaml.org,2002:bool'"),
        ('a: !!timestamp x', "tag 'tag:yaml.org,2002:timestamp'"),
        ('a: 2026-13-45', "'2026-13-45' cannot be read"),
        ('a: 0x_', "'0x_' cannot be read"),
        ('a: 1:30', "'1:30' is base 60 in YAML: quote a text, write a number in decimal"),
        ('a: -0:20.5', "'-0:20.5' is base 60 in YAML"),
        ('a: 010', "'010' is base 8 in YAML: write it without the leading 0, or quote a text"),
        (f'a: {"9" * 5000}', 'a number of 5000 characters'),
        (f'a: 0x{"f" * 5000}', 'a number of 5002 characters'),
        (f'a: {":".join(["59"] * 2000)}', 'a number of 5999 characters'),
        ('[' * 100_000, 'more than 20 levels'),
        ('- 1\n' * 100_000, 'line 20000, column 3: more than 20000 values'),
        ('a: "\\U00110000"', 'not a YAML document'),
        ('a: \x00', 'not a YAML document: special characters are not allowed'),
    ],
    ids=lambda value: value[:20],
)
def test_what_no_policy_needs_is_refused_at_once(text, message):
    with pytest.raises(FieldError) as caught:
        loads(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_alias_may_stand_for_a_value():
    assert loads('a: &fast 3.5\nb: *fast') == {'a': 3.5, 'b': 3.5}


def test_a_whole_file_is_never_printed():
    text = '\n'.join(f'user{number}:x:{number}:home' for number in range(1000))
    with pytest.raises(FieldError) as caught:
        parse(Cart, loads(text))
    assert len(str(caught.value)) < 200
    assert '\n' not in str(caught.value) and 'user500' not in str(caught.value)


def test_long_names_and_many_of_them_make_a_short_message():
    many = ', '.join(f'{"x" * 300}{number}: 1' for number in range(500))
    with pytest.raises(FieldError) as caught:
        parse(Cart, loads(f'{{{many}}}'))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ('text', 'number'), [('1e3', 1000.0), ('-2.5E-1', -0.25), ('1.e2', 100.0), ('1.0e+3', 1000.0)]
)
def test_an_exponent_needs_neither_dot_nor_sign_where_a_number_is_expected(text, number):
    @dataclass(frozen=True)
    class Speed:
        metres_per_s: float
        name: str = 'fast'

    read = parse(Speed, {**loads(f'metres_per_s: {text}'), 'name': '1e3'})
    assert read == Speed(number, '1e3')
    for wrong in ('1e', 'e3', '1e3x', '1 e3', "'12'"):
        with pytest.raises(FieldError):
            parse(Speed, loads(f'metres_per_s: {wrong}'))


def test_numbers_with_zeros_before_or_in_hexadecimal_are_read():
    assert loads('[0, 00, -0, 00.5, 1_000, 0x10]') == [0, 0, 0, 0.5, 1000, 16]


def test_a_parameter_file_is_read_as_rcl_reads_it():
    text = '{mode: 0644, start: 12:30, mac: 10:11:22:33:44:55, id: 007}'
    found = loads(text, as_rcl=True)
    assert found == {'mode': 420, 'start': '12:30', 'mac': '10:11:22:33:44:55', 'id': 7}


# --- A setting's default, range and words stand in its field, and are read from there alone

Way = Literal['blend', 'switch']


@dataclass(frozen=True)
class Inner:
    way: Way = setting('blend', 'how', name='inner_way')
    count: int = setting(3, 'how many', 1, 9)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Plain:
    """No settings: what is inside stays as it is."""

    secret: int = 1


@dataclass(frozen=True)
class Outer:
    steps: int | None = setting(None, 'steps', 0, 100)
    inner: Inner = field(default_factory=Inner)
    plain: Plain = field(default_factory=Plain)
    rate_hz: float = setting(2.0, 'rate', 0.5, 4.0)
    hidden: str = 'as it is'


def test_rows_come_in_the_order_of_the_fields_with_those_inside_at_their_places():
    rows = settings_of(Outer)
    assert [row.name for row in rows] == ['steps', 'inner_way', 'count', 'rate_hz']
    assert [row.default for row in rows] == [0, 'blend', 3, 2.0]
    assert rows[1].words == ('blend', 'switch')
    assert (rows[3].minimum, rows[3].maximum, rows[3].description) == (0.5, 4.0, 'rate')


def test_values_go_in_and_come_out_by_the_names_of_the_parameters():
    values = {'steps': 7, 'inner_way': 'switch', 'count': 9, 'rate_hz': 4.0}
    made = from_values(Outer, {**values, 'of_another_node': 1})
    assert made == Outer(steps=7, inner=Inner('switch', 9), rate_hz=4.0)
    assert values_of(made) == values


def test_none_is_zero_in_a_parameter():
    assert values_of(Outer())['steps'] == 0
    assert from_values(Outer, {**values_of(Outer(steps=5)), 'steps': 0}) == Outer()


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'way': 'leap'}, 'inner_way'),
        ({'count': 0}, 'count is 0: it must be 1 to 9'),
        ({'count': 10}, 'count is 10: it must be 1 to 9'),
        ({'count': float('nan')}, 'count is nan'),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_the_name_of_its_parameter(change, words):
    with pytest.raises(ValueError, match=words):
        replace(Inner(), **change)


def test_the_ends_of_a_range_are_allowed():
    assert (Inner(count=1).count, Inner(count=9).count) == (1, 9)
