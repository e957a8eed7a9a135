"""Tokens in PaliGemma's layout, from both kinds of vocabulary file, built here from a tiny text."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from vla_runtime.processing.tokenizer import Tokenizer

PAD, EOS, BOS, UNK = range(4)
SPECIALS = ('<pad>', '<eos>', '<bos>', '<unk>')
CORPUS = [
    'Task: pick up the red cup, State: 0 128 255 -1 77;\nAction: ',
    'Task: fold the blue cloth, State: 12 200 31 190 64;\nAction: ',
    'Task: push the green block\nAdvantage: positive;\nAction: ',
    'open the drawer and put the cup in it',
]


def _train_sentencepiece(**changes) -> bytes:
    """A BPE model with the options of Gemma's: no normalisation, bytes for what is unknown."""
    model = io.BytesIO()
    options = {
        'model_type': 'bpe',
        'vocab_size': 360,
        'normalization_rule_name': 'identity',
        'add_dummy_prefix': False,
        'remove_extra_whitespaces': False,
        'split_digits': True,
        'byte_fallback': True,
        'user_defined_symbols': ['\n'],
        'pad_id': PAD,
        'eos_id': EOS,
        'bos_id': BOS,
        'unk_id': UNK,
        'pad_piece': '<pad>',
        'eos_piece': '<eos>',
        'bos_piece': '<bos>',
        'hard_vocab_limit': False,
        'num_threads': 1,
        'minloglevel': 2,
        **changes,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, **options
    )
    return model.getvalue()


def _as_json(model: bytes) -> dict:
    """The same vocabulary as a tokenizer.json, laid out as Gemma's is."""
    backend = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = {backend.id_to_piece(i): i for i in range(backend.get_piece_size())}
    merges = []
    for piece, index in ids.items():
        if backend.is_control(index) or backend.is_byte(index) or backend.is_unknown(index):
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += [
            (-backend.get_score(index), ids[left], ids[right], left, right) for left, right in pairs
        ]
    merges.sort()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            ids,
            [(left, right) for *_, left, right in merges],
            unk_token='<unk>',
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Replace(' ', '▁')
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([tokenizers.AddedToken('\n', normalized=False)])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope='module')
def model():
    return _train_sentencepiece()


@pytest.fixture(scope='module')
def files(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp('vocabulary')
    (folder / 'tokenizer.model').write_bytes(model)
    (folder / 'tokenizer.json').write_text(json.dumps(_as_json(model)), encoding='utf-8')
    return folder


@pytest.fixture(scope='module', params=['tokenizer.model', 'tokenizer.json'])
def tokenizer(files, request):
    return Tokenizer.load(files / request.param)


@pytest.fixture(scope='module')
def both(files):
    return Tokenizer.load(files / 'tokenizer.model'), Tokenizer.load(files / 'tokenizer.json')


def test_layout_is_bos_then_text_then_padding(tokenizer, model):
    backend = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = backend.encode(CORPUS[0])
    tokens, mask = tokenizer.encode(CORPUS[0], len(text) + 6)
    assert tokens.dtype == np.int64 and mask.dtype == bool
    assert tokens.tolist() == [BOS, *text, *[PAD] * 5]
    assert mask.tolist() == [True] * (len(text) + 1) + [False] * 5


@given(
    text=st.text(alphabet=st.characters(categories=['L', 'N', 'P', 'S']) | st.sampled_from(' \n'))
)
def test_both_files_of_one_vocabulary_give_the_same_tokens(both, text):
    first, second = (tokenizer.encode(text, 256) for tokenizer in both)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert both[0].vocabulary_size == both[1].vocabulary_size
    assert first[0].max() < both[0].vocabulary_size


@pytest.mark.parametrize('half', ['\ud83d', '\udc00'])
def test_half_a_character_is_named_with_its_place(tokenizer, half):
    with pytest.raises(ValueError, match='character') as error:
        tokenizer.encode(f'pick up{half} the cup', 40)
    str(error.value).encode('utf-8')
    tokens, _ = tokenizer.encode('pick up 🙂 the cup', 40)
    assert tokens[0] == BOS, 'a whole pair is a character as any other'


def test_newline_tokenised_apart_is_the_same_as_at_the_end_of_the_text(tokenizer):
    # openpi encodes pi0's last newline by itself.
    joined, mask = tokenizer.encode('pick up the cup\n', 40)
    text, text_mask = tokenizer.encode('pick up the cup', 40)
    newline, newline_mask = tokenizer.encode('\n', 40)
    apart = [*text[text_mask], *newline[newline_mask][1:]]
    assert joined[mask].tolist() == apart


@given(text=st.text(alphabet='abcdek ,:;\n0123', max_size=40), missing=st.integers(1, 45))
def test_prompt_that_does_not_fit_says_by_how_many_tokens(both, text, missing):
    for tokenizer in both:
        needed = int(tokenizer.encode(text, 100)[1].sum())
        tokens, mask = tokenizer.encode(text, needed)
        assert mask.all() and tokens[0] == BOS
        if missing < needed:
            with pytest.raises(ValueError) as error:
                tokenizer.encode(text, needed - missing)
            assert f'prompt of {needed} tokens is {missing} too long' in str(error.value)
            assert f'{needed - missing} places' in str(error.value)


@pytest.mark.parametrize('adds_bos', [False, True])
def test_bos_comes_exactly_once_whatever_the_file_adds_by_itself(model, tmp_path, adds_bos):
    content = _as_json(model)
    if adds_bos:
        content['post_processor'] = {
            'type': 'TemplateProcessing',
            'single': [
                {'SpecialToken': {'id': '<bos>', 'type_id': 0}},
                {'Sequence': {'id': 'A', 'type_id': 0}},
                {'SpecialToken': {'id': '<eos>', 'type_id': 0}},
            ],
            'pair': [{'Sequence': {'id': 'A', 'type_id': 0}}],
            'special_tokens': {
                name: {'id': name, 'ids': [index], 'tokens': [name]}
                for name, index in (('<bos>', BOS), ('<eos>', EOS))
            },
        }
    path = tmp_path / 'tokenizer.json'
    path.write_text(json.dumps(content), encoding='utf-8')
    tokens, mask = Tokenizer.load(path).encode('pick up the cup', 30)
    assert tokens[0] == BOS
    assert (tokens[mask] == BOS).sum() == 1 and EOS not in tokens[mask]


def test_truncation_and_padding_asked_for_by_the_file_are_switched_off(model, files, tmp_path):
    content = _as_json(model)
    content['truncation'] = {
        'direction': 'Right',
        'max_length': 4,
        'strategy': 'LongestFirst',
        'stride': 0,
    }
    content['padding'] = {
        'strategy': {'Fixed': 50},
        'direction': 'Left',
        'pad_to_multiple_of': None,
        'pad_id': PAD,
        'pad_type_id': 0,
        'pad_token': '<pad>',
    }
    path = tmp_path / 'tokenizer.json'
    path.write_text(json.dumps(content), encoding='utf-8')
    changed = Tokenizer.load(path).encode(CORPUS[1], 80)
    plain = Tokenizer.load(files / 'tokenizer.json').encode(CORPUS[1], 80)
    np.testing.assert_array_equal(changed[0], plain[0])
    np.testing.assert_array_equal(changed[1], plain[1])
    with pytest.raises(ValueError, match='too long'):
        Tokenizer.load(path).encode(CORPUS[1], 4)


@pytest.mark.parametrize('special', SPECIALS)
def test_special_token_spelled_in_an_instruction_is_plain_text(tokenizer, special):
    tokens, mask = tokenizer.encode(f'pick {special} up', 60)
    assert (tokens[mask] == BOS).sum() == 1
    assert not np.isin(tokens[mask][1:], [PAD, EOS, BOS, UNK]).any()


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer.model'])
def test_without_bos_the_text_stands_alone(files, name):
    path = files / name
    tokens, mask = Tokenizer.load(path, bos=False).encode(CORPUS[1], 80)
    with_bos, longer = Tokenizer.load(path).encode(CORPUS[1], 80)
    assert BOS not in tokens[mask]
    np.testing.assert_array_equal(tokens[mask], with_bos[longer][1:])


def test_a_vocabulary_without_bos_serves_where_none_is_wanted(tmp_path):
    path = tmp_path / 'tokenizer.model'
    path.write_bytes(_train_sentencepiece(pad_id=-1, eos_id=0, bos_id=-1, unk_id=2))
    with pytest.raises(ValueError, match='token'):
        Tokenizer.load(path)
    tokens, mask = Tokenizer.load(path, bos=False).encode('cup', 20)
    assert mask.any() and not tokens[~mask].any()


def test_padding_is_zero_where_the_vocabulary_has_no_padding_token(tmp_path):
    path = tmp_path / 'tokenizer.model'
    path.write_bytes(_train_sentencepiece(pad_id=-1, eos_id=0, bos_id=1, unk_id=2))
    tokens, mask = Tokenizer.load(path).encode('cup', 20)
    assert tokens[0] == 1 and not tokens[~mask].any()


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer.model'])
@pytest.mark.parametrize('content', [b'', b'{"version": 1}', b'\xff\xfe not a tokenizer \x00'])
def test_unreadable_file_is_an_error_that_names_it(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf'{name}: (is empty|is no tokenizer|not a readable)'):
        Tokenizer.load(path)


def test_missing_file_and_unknown_kind_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'tokenizer\.model'):
        Tokenizer.load(tmp_path / 'tokenizer.model')
    (tmp_path / 'vocab.txt').write_text('cup')
    with pytest.raises(ValueError, match=r'vocab\.txt'):
        Tokenizer.load(tmp_path / 'vocab.txt')


def test_vocabulary_without_bos_is_an_error(tmp_path):
    path = tmp_path / 'tokenizer.model'
    path.write_bytes(_train_sentencepiece(bos_id=-1))
    with pytest.raises(ValueError, match=r'tokenizer\.model'):
        Tokenizer.load(path)
    path = tmp_path / 'tokenizer.json'
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({'<unk>': 0, 'a': 1}, [], unk_token='<unk>'))
    plain.save(str(path))
    with pytest.raises(ValueError, match=r'tokenizer\.json'):
        Tokenizer.load(path)
