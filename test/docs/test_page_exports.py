"""The exports of the pages, word for word, on folders built like those that the pages name.

Only what the published policies do not need is added: heads of widths that nobody published, and
no ONNX files, for speed. Folders and tokenizers are where the commands before an export would have
put them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from bitvla_folders import write_folder as write_bitvla_folder
from checkpoint_folders import (
    copy_lerobot_folder,
    edit_config,
    openpi_statistics,
    pi0_tensors,
    tiny_tensors,
    write_openpi_folder,
)
from evo1_folders import options_of, write_folder
from groot_folders import JOINTS, write_groot_folder
from groot_n17_folders import joints_of, write_backbone, write_nvidia_folder
from libero_folders import write_libero_folder
from multi_task_dit_folders import write_folder as write_multi_task_dit_folder
from oft_cases import write_oft_folder
from openvla_folders import write_folder as write_openvla_folder
from pages import PAGES, blocks
from paths import ROOT
from pi0_fast_cases import options_of as pi0_fast_options
from pi0_fast_cases import write_folder as write_pi0_fast_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file
from tiny_policy import tokenizer_of
from torch import Tensor

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main

pytestmark = pytest.mark.cases

RELEASES = ROOT / 'test' / 'lerobot_releases'

from test_releases import write_folder as write_release  # noqa: E402

PI_HEADS = ('--vision-heads', '4')
SO101 = (
    'shoulder_pan.pos',
    'shoulder_lift.pos',
    'elbow_flex.pos',
    'wrist_flex.pos',
    'wrist_roll.pos',
    'gripper.pos',
)
# Of `write_groot_folder`.
N15_ACTIONS = 7
ALOHA = ('j1', 'j2', 'j3', 'j4', 'left_gripper', 'right_gripper')


def write_dataset(folder: Path, state: tuple[str, ...], actions: tuple[str, ...]) -> None:
    features = {
        key: {'dtype': 'float32', 'shape': [len(names)], 'names': list(names)}
        for key, names in (('observation.state', state), ('action', actions))
    }
    (folder / 'meta').mkdir(parents=True)
    (folder / 'meta' / 'info.json').write_text(json.dumps({'fps': 30, 'features': features}))


def write_paligemma_tokenizer(path: Path) -> None:
    """A SentencePiece model with PaliGemma's special tokens, as small as the tiny policies."""
    words = (f'{word} {number}' for word in ('task', 'state', 'action') for number in range(256))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words,
        model_prefix=str(path.with_suffix('')),
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        minloglevel=2,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )
    path.with_suffix('.vocab').unlink()


def lerobot_pi(here: Path) -> tuple[str, ...]:
    write_release(RELEASES / '0.6.1_pi05', here / TRAINED)
    # LeRobot's folders have no tokenizer.
    (copy_lerobot_folder(here / 'path/to/checkpoint') / 'tokenizer.json').unlink()
    write_paligemma_tokenizer(here / 'paligemma_tokenizer.model')
    put_tokenizer(tokenizer_of('pi05'), here / 'path/to/tokenizer.json')
    write_dataset(here / 'path/to/dataset', SO101, SO101)
    return PI_HEADS


def lerobot_saved(here: Path) -> tuple[str, ...]:
    """A folder of after 0.6.1, with the tokenizer in it."""
    added = lerobot_pi(here)
    put_tokenizer(tokenizer_of('pi05'), here / TRAINED / 'tokenizer' / 'tokenizer.json')
    return added


def openpi(here: Path) -> tuple[str, ...]:
    write_openpi_folder(here / 'path/to/openpi', tiny_tensors(), openpi_statistics(7))
    return lerobot_pi(here)


def openpi_aloha(here: Path) -> tuple[str, ...]:
    write_openpi_folder(here / 'path/to/openpi', pi0_tensors(), openpi_statistics(14))
    write_paligemma_tokenizer(here / 'paligemma_tokenizer.model')
    return PI_HEADS


def smolvla(here: Path) -> tuple[str, ...]:
    write_release(RELEASES / '0.6.1_smolvla', here / TRAINED)
    put_tokenizer(tokenizer_of('smolvla'), here / 'path/to/vlm/tokenizer.json')
    write_dataset(here / 'path/to/dataset', SO101, SO101)
    return ('--vision-heads', '4', '--kv-heads', '2')


def act(here: Path) -> tuple[str, ...]:
    # The published folder is older than processors: its statistics are among the tensors.
    write_release(RELEASES / '0.3.3_act', here / 'path/to/act')
    write_dataset(here / 'path/to/dataset', ALOHA, ALOHA)
    return ()


def evo1(here: Path) -> tuple[str, ...]:
    case = shipped('evo1_a')
    (here / 'path/to').mkdir(parents=True)
    folder = write_folder(here / 'path/to/evo1', case, 0)
    put_tokenizer(folder / 'tokenizer.json', here / 'path/to/vlm/tokenizer.json')
    (folder / 'tokenizer.json').unlink()
    options = options_of(case, 0)
    state, actions = (
        (*names[:-1], 'gripper') for names in (options.state_names, options.action_names)
    )
    write_dataset(here / 'path/to/dataset', state, actions)
    return (
        *('--vision-heads', str(options.vision_heads)),
        *('--kv-heads', str(options.kv_heads)),
    )


def openvla(here: Path) -> tuple[str, ...]:
    case = shipped('openvla_full_a')
    folder = write_openvla_folder(here / 'path/to/openvla', case)
    config = json.loads((folder / 'config.json').read_text())
    stats = config['norm_stats']
    edit_config(folder, norm_stats={'bridge_orig': stats['set_one'], 'other': stats['set_two']})
    d = json.loads(case.read_text())
    return '--heads', f'dino={d["dino_heads"]},siglip={d["siglip_heads"]}'


def openvla_oft(here: Path) -> tuple[str, ...]:
    case = shipped('openvla_full_a')
    (here / 'path/to').mkdir(parents=True)
    write_oft_folder(here / 'path/to/openvla-oft', case)
    d = json.loads(case.read_text())
    return '--heads', f'dino={d["dino_heads"]},siglip={d["siglip_heads"]}'


def pi0_fast(here: Path) -> tuple[str, ...]:
    case = shipped('pi0_fast_a')
    folder = write_pi0_fast_folder(here / 'path/to/pi0_fast', case)
    put_tokenizer(folder / 'tokenizer.json', here / 'path/to/paligemma/tokenizer.json')
    (folder / 'tokenizer.json').unlink()
    options = pi0_fast_options(case, folder)
    write_dataset(here / 'path/to/dataset', options.state_names, options.action_names)
    d = json.loads(case.read_text())
    return (
        *('--vision-heads', str(d['v_heads'])),
        *('--kv-heads', str(d['num_kv_heads'])),
        *('--target', ','.join(options.targets)),
    )


def bitvla(here: Path) -> tuple[str, ...]:
    write_bitvla_folder(here / 'path/to/bitvla', shipped('bitvla_a'))
    return ()


def diffusion(here: Path) -> tuple[str, ...]:
    """A folder whose state and actions have two numbers, as the page's."""
    folder = here / 'path/to/diffusion'
    shutil.copytree(shipped('diffusion_folder').with_suffix(''), folder)
    for file in folder.glob('*.json'):
        file.write_text(re.sub(r'"shape": \[\s*7\s*\]', '"shape": [2]', file.read_text()))
    for file in folder.glob('*.safetensors'):
        save_file({name: of_two(name, value) for name, value in load_file(file).items()}, file)
    return ()


def of_two(name: str, tensor: Tensor) -> Tensor:
    """Cut a tensor of a policy of seven numbers, two steps, to the first two of the seven."""
    if name.endswith('cond_encoder.1.weight'):
        # Each step's state stands before its features.
        tensor = torch.cat(
            [torch.cat([one[:, :2], one[:, 7:]], 1) for one in tensor.chunk(2, 1)], 1
        )
    elif name.startswith(('action.', 'observation.state.', 'diffusion.unet.final_conv.1.')):
        tensor = tensor[:2]
    elif re.search(r'unet\.down_modules\.0\.0\.(conv1\.block\.0|residual_conv)\.weight', name):
        tensor = tensor[:, :2]
    return tensor.contiguous()


def multi_task_dit(here: Path) -> tuple[str, ...]:
    case = shipped('multi_task_dit_a')
    folder = write_multi_task_dit_folder(here / 'path/to/multi_task_dit', case)
    put_tokenizer(folder / 'tokenizer.json', here / 'path/to/clip/tokenizer.json')
    (folder / 'tokenizer.json').unlink()
    d = json.loads(case.read_text())
    heads = ('--vision-heads', str(d['v_heads']), '--kv-heads', str(d['t_heads']))
    # Statistics of random numbers, which two of the actions leave as if they were deltas.
    return (*heads, '--target', 'b,f')


def xvla(here: Path) -> tuple[str, ...]:
    folder = here / 'path/to/xvla'
    shutil.copytree(shipped('xvla_folder').with_suffix(''), folder)
    put_tokenizer(folder / 'tokenizer.json', here / 'path/to/bart/tokenizer.json')
    (folder / 'tokenizer.json').unlink()
    return ()


def vla_jepa_of_six(here: Path) -> tuple[str, ...]:
    """A folder whose state and actions are six joints, as those of the simulated arm."""
    added = vla_jepa(here)
    folder = here / 'path/to/vla_jepa'
    for file in folder.glob('*.json'):
        file.write_text(re.sub(r'"shape": \[\s*[78]\s*\]', '"shape": [6]', file.read_text()))
    edit_config(folder, action_dim=6, state_dim=6)
    for file in folder.glob('*.safetensors'):
        save_file({name: of_six(name, value) for name, value in load_file(file).items()}, file)
    return added


def of_six(name: str, tensor: Tensor) -> Tensor:
    """Cut a tensor of VLA-JEPA to six numbers of its state and actions."""
    if name.endswith(('action_encoder.layer1.weight', 'state_encoder.layer1.weight')):
        tensor = tensor[:, :6]
    elif name.startswith(('action.', 'observation.state.')) or 'action_decoder.layer2' in name:
        tensor = tensor[:6]
    return tensor.contiguous()


def vla_jepa(here: Path) -> tuple[str, ...]:
    folder = here / 'path/to/vla_jepa'
    shutil.copytree(shipped('vla_jepa_folder').with_suffix(''), folder)
    shutil.copytree(shipped('vla_jepa_folder_base').with_suffix(''), here / 'path/to/qwen')
    joints = tuple(f'joint_{n}' for n in range(7))
    write_dataset(here / 'path/to/dataset', (*joints, 'gripper'), (*joints[:6], 'gripper'))
    return ()


def molmoact2(here: Path, *, target: str) -> tuple[str, ...]:
    shutil.copytree(shipped('molmoact2_folder').with_suffix(''), here / 'path/to/molmoact2')
    edit_config(here / 'path/to/molmoact2', checkpoint_path='allenai/MolmoAct2-SO100_101')
    model = shipped('molmoact2_folder_base').with_suffix('')
    shutil.copytree(model, here / 'path/to/MolmoAct2-SO100_101')
    # Statistics are of random numbers.
    return ('--target', target)


def groot_n15(here: Path) -> tuple[str, ...]:
    write_groot_folder(here / 'path/to/n15')
    put_tokenizer(tokenizer_of('groot_n15'), here / 'path/to/eagle/tokenizer.json')
    actions = tuple(f'a{number}' for number in range(N15_ACTIONS))
    write_dataset(here / 'path/to/dataset', JOINTS, actions)
    # The published model has 16 actions a chunk.
    return ('--heads', 'context=4,dit=4', '--vision-heads', '4', '--horizon', '8')


def groot_n16(here: Path) -> tuple[str, ...]:
    case = shipped('groot_n16_a')
    d = json.loads(case.read_text())
    folder = write_nvidia_folder(here / 'path/to/n16', case)
    name_robot(folder, d['embodiment_tag'])
    write_backbone(here / 'path/to/eagle2', case)
    # The case's gripper is commanded elsewhere than it was measured.
    actions = (*joints_of(case, 'action')[:-1], 'grip')
    write_dataset(here / 'path/to/dataset', joints_of(case), actions)
    return ('--heads', f'dit={d["dit_heads"]}', '--target', 'grip')


def name_robot(folder: Path, tag: str) -> None:
    """Call the robot of a folder as the page does, TAG."""
    for file in ('processor_config.json', 'statistics.json', 'embodiment_id.json'):
        text = (folder / file).read_text().replace(f'"{tag}"', '"tag"')
        (folder / file).write_text(text)


def groot_n17(here: Path) -> tuple[str, ...]:
    case = shipped('groot_n17_a')
    d = json.loads(case.read_text())
    cut = {'use_albumentations': True, 'shortest_image_edge': 48, 'crop_fraction': 0.95}
    folder = write_nvidia_folder(here / 'path/to/n17', case, **cut)
    name_robot(folder, d['embodiment_tag'])
    write_backbone(here / 'path/to/cosmos', case)
    # The case's gripper is commanded elsewhere than it was measured.
    actions = (*joints_of(case, 'action')[:-1], 'grip')
    write_dataset(here / 'path/to/dataset', joints_of(case), actions)
    return ('--heads', f'dit={d["dit_heads"]},context={d["vlsa_heads"]}')


def libero(here: Path) -> tuple[str, ...]:
    # The page is about folders of any family; SmolVLA's lack the tokenizer.
    write_libero_folder(here / 'path/to/checkpoint', np.zeros(7), np.full(7, 0.3))
    return ('--vision-heads', '4', '--kv-heads', '2')


def twist(here: Path, numbers: int = 6) -> tuple[str, ...]:
    write_libero_folder(
        here / 'path/to/checkpoint', np.zeros(numbers), np.full(numbers, 0.3), state=numbers
    )
    return ('--vision-heads', '4', '--kv-heads', '2')


def adapter(here: Path) -> tuple[str, ...]:
    lora = RELEASES / '0.6.1_pi05_lora'
    write_release(lora, here / 'path/to/adapter')
    base = json.loads((lora / 'description.json').read_text())['adapter_of']
    write_release(RELEASES / base, here / 'path/to/checkpoint')
    write_dataset(here / 'path/to/dataset', SO101, SO101)
    put_tokenizer(tokenizer_of('pi05'), here / 'path/to/checkpoint/tokenizer.json')
    put_tokenizer(tokenizer_of('pi05'), here / 'path/to/adapter/tokenizer.json')
    return PI_HEADS


def put_in_degrees(here: Path) -> None:
    """Make degrees of the statistics of folders that were trained in radians."""
    for file in here.rglob('policy_*processor_step_*.safetensors'):
        scaled = {
            name: torch.rad2deg(values)
            if name.startswith(('action.', 'observation.state.'))
            else values
            for name, values in load_file(file).items()
        }
        save_file(scaled, file)


def put_tokenizer(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


TRAINED = 'outputs/train/pick/checkpoints/last/pretrained_model'
# The folder of an export's command, and a word of it, to what makes such a folder.
MAKERS: dict[tuple[str, str], Callable[[Path], tuple[str, ...]]] = {
    ('path/to/openpi', '--adapt-to-pi'): openpi_aloha,
    ('path/to/openpi', ''): openpi,
    (TRAINED, 'paligemma_tokenizer.model'): lerobot_pi,
    (TRAINED, 'path/to/vlm/tokenizer.json'): smolvla,
    (TRAINED, ''): lerobot_saved,
    ('path/to/checkpoint', 'paligemma_tokenizer.model'): lerobot_pi,
    ('path/to/checkpoint', 'path/to/tokenizer.json'): lerobot_pi,
    ('path/to/checkpoint', '--pose-steps'): libero,
    ('path/to/checkpoint', 'vx,vy,vz,wx,wy,wz,grip'): partial(twist, numbers=7),
    ('path/to/checkpoint', '--pose'): twist,
    ('path/to/adapter', '--base'): adapter,
    ('path/to/act', ''): act,
    ('path/to/evo1', ''): evo1,
    ('path/to/n15', ''): groot_n15,
    ('path/to/openvla', ''): openvla,
    ('path/to/openvla-oft', ''): openvla_oft,
    ('path/to/pi0_fast', ''): pi0_fast,
    ('path/to/bitvla', ''): bitvla,
    ('path/to/diffusion', ''): diffusion,
    ('path/to/multi_task_dit', ''): multi_task_dit,
    ('path/to/xvla', ''): xvla,
    ('path/to/vla_jepa', 'path/to/demo'): vla_jepa_of_six,
    ('path/to/vla_jepa', ''): vla_jepa,
    ('path/to/molmoact2', 'path/to/demo'): partial(molmoact2, target='wrist_flex'),
    ('path/to/molmoact2', ''): partial(molmoact2, target='d'),
    ('path/to/n16', ''): groot_n16,
    ('path/to/n17', ''): groot_n17,
}


def exports(page: str) -> list[list[str]]:
    """Words of the exports of checkpoints in a page's blocks, behind `vla_runtime`."""
    text = '\n'.join(blocks(page, '', 'bash')).replace('\\\n', ' ')
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if 'export' in line]
    found = [line[3:] for line in lines if line[:4] == ['./run', 'exec', 'vla_runtime', 'export']]
    return [words for words in found if '--onnx-precision' not in words]


def robots_of(page: str, bundle: str) -> list[str]:
    """Robot files that a page compares with the bundle that it has just made."""
    text = '\n'.join(blocks(page, '', 'bash'))
    found = re.findall(rf'vla_runtime check (\w+) {bundle}$', text, re.MULTILINE)
    return found if page.startswith(('docs/start/', 'docs/reference/families/')) else []


# Pages of a new family, and of bundles that are exported again, are followed elsewhere.
ELSEWHERE = (
    'docs/howto/adding_a_family.md',
    'docs/howto/exported_networks.md',
    'docs/howto/recording.md',
)
COMMANDS = [
    (page, tuple(words)) for page in PAGES if page not in ELSEWHERE for words in exports(page)
]


def test_pages_that_lead_to_the_simulated_arm_say_which_bundle_fits_it() -> None:
    for family in ('xvla', 'molmoact2', 'vla_jepa'):
        page = f'docs/reference/families/{family}.md'
        (words,) = (words for at, words in COMMANDS if at == page and 'path/to/demo' in words)
        assert robots_of(page, words[words.index('--out') + 1]) == ['tabletop']


def test_every_page_of_a_family_has_an_export() -> None:
    pages = {page for page, _ in COMMANDS}
    assert {page for page in PAGES if page.startswith('docs/reference/families/')} <= pages


@pytest.mark.parametrize(
    ('page', 'words'), COMMANDS, ids=lambda part: part if isinstance(part, str) else part[1]
)
def test_an_export_of_a_page_runs_as_it_is_written(tmp_path, monkeypatch, page, words) -> None:
    make = next(
        make
        for (folder, word), make in MAKERS.items()
        if words[1] == folder and word in (*words, '')
    )
    added = make(tmp_path)
    if any(word.startswith('deg') for word in words):
        put_in_degrees(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*words, *added, '--onnx-precision', 'none']) == 0
    bundle = words[words.index('--out') + 1]
    spec = read_bundle(bundle).spec
    if '--pose-steps' in words:
        assert [pose.delta_from for pose in spec.poses] == ['step']
    # Without units of its own, what is measured of the pose has them by --pose-state.
    for pose in spec.poses:
        measured = (*pose.state_position, *pose.state_rotation)
        units = {one.name: one.unit for one in spec.state}
        assert [units[name] for name in measured] == [*'mmm', *['rad'] * 3]
    # What a quick start says next. The tiny ACT's images are not of the robot's size.
    for robot in robots_of(page, bundle) if spec.family != 'act' else ():
        assert main(['check', robot, bundle]) == 0
    # Units are as the page says, whatever the data set calls the gripper.
    assert {one.unit for one in (*spec.state, *spec.actions)} <= {
        *('rad', 'deg', '1', 'percent', 'm', 'm/s', 'rad/s'),
    }
