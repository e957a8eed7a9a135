"""A checkpoint's tensors: found, renamed, checked, copied; never computed with.

Tensors are copied byte by byte: nothing is rounded, and memory does not grow with the checkpoint.
Only safetensors are opened here; `torch_archives` reads heads kept in a pickle.
"""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_runtime.bundle.schema import WEIGHT_BYTES
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, read_array, read_header
from vla_runtime.files.checkpoint_folders import (
    INDEX_FILE,
    SINGLE_FILE,
    checkpoint_below,
    download_hint,
    has_adapter,
    unfinished_download,
)
from vla_runtime.files.json_file import read_json
from vla_runtime.files.quotes import join_truncated

PICKLE_SUFFIXES = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.pickle')
# Folder that LeRobot writes through torch.distributed.checkpoint.
_SHARDED = ('pytorch_model_fsdp_*', 'pretrained_model/pytorch_model_fsdp_*')
_BLOCK_BYTES = 1 << 22
_THEIR_NAMES = TensorNames()
# Wrappers of PyTorch around a whole policy, and around a module that it compiled.
_PARALLEL, _COMPILED = 'module.', '_orig_mod.'
_EXPECTED = (
    "; give the folder of a checkpoint (LeRobot's is OUTPUT/checkpoints/last/pretrained_model) or "
    'of a policy bundle'
)


class ComputedTensor(StoredTensor):
    """A tensor that is computed when it is written."""

    def data(self) -> bytes:
        """Return its bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class JoinedTensor(ComputedTensor):
    """Tensors one behind the other along their first axis."""

    parts: tuple[StoredTensor, ...]

    def data(self) -> bytes:
        written = io.BytesIO()
        for part in self.parts:
            if part.dtype == self.dtype:
                _copy(part, written, lambda count: None)
            else:
                written.write(read_array(part).astype('<f4').tobytes())
        return written.getvalue()


def joined(first: StoredTensor, *others: StoredTensor) -> JoinedTensor:
    """Join tensors along their first axis, in float32 where their precisions differ.

    Raises CheckpointError: they do not fit.
    """
    for other in others:
        if other.shape[1:] != first.shape[1:]:
            raise CheckpointError(
                f"{other.path}: tensor '{other.name}' is {other.dtype} {list(other.shape)}, which "
                f"does not go on '{first.name}', {first.dtype} {list(first.shape)}"
            )
    rows = sum(one.shape[0] for one in (first, *others))
    shape = (rows, *first.shape[1:])
    dtype = first.dtype if all(one.dtype == first.dtype for one in others) else 'F32'
    return JoinedTensor(first.name, first.path, dtype, shape, first.offset, parts=(first, *others))


class CheckpointError(ExportError):
    """Tensors that cannot be used; the message names file and tensors."""


def read_tensors(folder: str | Path, names: TensorNames = _THEIR_NAMES) -> dict[str, StoredTensor]:
    """Find a checkpoint's tensors, under our names where the table knows them.

    Unused tensors and a prefix before every name are left out; unknown tensors keep their names,
    so that `check_tensors` lists them. `folder`: has `model.safetensors`, or shards and
    `model.safetensors.index.json`. Raises CheckpointError: no safetensors, a pickle, a damaged
    file, a shard or tensor that the index names and nobody has, two tensors of one name;
    JsonError: an index that is damaged or lacks its `weight_map`.
    """
    folder = Path(folder)
    tensors: dict[str, StoredTensor] = {}
    found = read_stored(folder)
    prefix = _prefix([stored.name for stored in found], names)
    bare = [stored.name.removeprefix(prefix) for stored in found]
    ours = [() if names.is_unused(one) else names.parts(one) or (one,) for one in bare]
    for stored, parts in zip(found, ours, strict=True):
        for name, part in cut(stored, parts):
            if name in tensors:
                raise CheckpointError(
                    f"{stored.path}: tensors '{tensors[name].name}' and '{stored.name}' are the "
                    f"same tensor ('{name}') under two names; remove one"
                )
            tensors[name] = part
    for copy, original in names.tied.items():
        # The copy may be the only one of a tied pair. Where both are there, it serves nothing.
        if copy in tensors:
            tensors.setdefault(original, tensors.pop(copy))
    return tensors


def read_stored(folder: Path) -> list[StoredTensor]:
    """Find a checkpoint's tensors by their own names without wrappers; raise as `read_tensors`."""
    found = _stored_tensors(folder)
    parallel = _PARALLEL if all(stored.name.startswith(_PARALLEL) for stored in found) else ''
    return [
        replace(stored, name=stored.name.removeprefix(parallel).replace(_COMPILED, ''))
        for stored in found
    ]


def prefixes(names: Collection[str]) -> list[str]:
    """Return what stands before every name, from nothing to all parts that they share."""
    first, last = min(names, default=''), max(names, default='')
    found, parts = [''], first.split('.')
    for count in range(1, len(parts)):
        prefix = '.'.join([*parts[:count], ''])
        # A prefix of the first and last in order is one of all.
        if not last.startswith(prefix):
            break
        found.append(prefix)
    return found


def _prefix(stored: Collection[str], names: TensorNames) -> str:
    """Return a prefix that hides all names from the family's table; '' for one it knows."""
    for prefix in prefixes(stored):
        if any(names.parts(name.removeprefix(prefix)) for name in stored):
            return prefix
    return ''


def cut(stored: StoredTensor, names: tuple[str, ...]) -> list[tuple[str, StoredTensor]]:
    """Cut a tensor along its first axis into equal parts, uncopied; CheckpointError: uneven."""
    if len(names) <= 1:
        return [(name, stored) for name in names]
    length = stored.shape[0] if stored.shape else 0
    if length % len(names):
        raise CheckpointError(
            f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)}, which does not "
            f'divide into the {len(names)} tensors that are stacked in it'
        )
    count = length // len(names)
    return [(name, stored.rows(index * count, count)) for index, name in enumerate(names)]


def copy_tensors(
    tensors: Mapping[str, StoredTensor],
    path: str | Path,
    *,
    advance: Callable[[int], object] = lambda count: None,
) -> None:
    """Write tensors to one safetensors file; `advance` gets the bytes of each block."""
    # The format wants offsets aligned for the widest type: widest first, then by name.
    order = sorted(tensors, key=lambda name: (-WEIGHT_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    end = 0
    for name in order:
        stored = tensors[name]
        header[name] = {
            'dtype': stored.dtype,
            'shape': list(stored.shape),
            'data_offsets': [end, end + stored.size],
        }
        end += stored.size
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with Path(path).open('wb') as target:
        target.write(struct.pack('<Q', len(text)) + text)
        for name in order:
            _copy(tensors[name], target, advance)


def _copy(stored: StoredTensor, target: BinaryIO, advance: Callable[[int], object]) -> None:
    if isinstance(stored, ComputedTensor):
        data = stored.data()
        target.write(data)
        advance(len(data))
        return
    with stored.path.open('rb') as source:
        source.seek(stored.offset)
        left = stored.size
        while left:
            block = source.read(min(left, _BLOCK_BYTES))
            if not block:
                raise CheckpointError(f"{stored.path}: ends inside tensor '{stored.name}'")
            target.write(block)
            left -= len(block)
            advance(len(block))


def _stored_tensors(folder: Path) -> list[StoredTensor]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    # A dangling link counts as there, so that opening it reports it as dangling.
    has_single, has_index = os.path.lexists(single), os.path.lexists(index)
    if folder.is_file():
        _refuse_pickle(folder)
        raise CheckpointError(f'{folder}: is a file; expected the folder that holds {SINGLE_FILE}')
    if not folder.is_dir():
        raise CheckpointError(
            f'{folder}: no such folder; expected the folder of a checkpoint on this disk'
            f'{download_hint(folder)}'
        )
    if has_single and has_index:
        raise CheckpointError(
            f'{folder}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is not meant'
        )
    if has_single:
        return _header(single)
    if has_index:
        return _read_shards(index)
    for path in sorted(folder.iterdir()):
        _refuse_pickle(path)
    raise CheckpointError(
        f'{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}{_nearby(folder) or _EXPECTED}'
    )


def _header(path: Path) -> list[StoredTensor]:
    try:
        return read_header(path)
    except TensorsError as error:
        raise CheckpointError(str(error)) from None


def _refuse_pickle(path: Path) -> None:
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f'{path}: is a pickle, and opening a pickle runs the code inside it; convert it to '
            f'{SINGLE_FILE} where you trust it (safetensors.torch.save_file)'
        )


def _nearby(folder: Path) -> str:
    """Hint for a folder that is wrong in a usual way; '' for others."""
    if (folder / 'params').is_dir():
        return (
            "; this looks like openpi's JAX checkpoint: convert it with openpi's "
            'examples/convert_jax_model_to_pytorch.py'
        )
    if any(any(folder.glob(pattern)) for pattern in _SHARDED):
        return (
            '; its weights are shards of a sharded training (checkpoint_format dcp): convert them '
            f'where LeRobot is installed: lerobot-convert-dcp --checkpoint_dir={folder}'
        )
    if (part := unfinished_download(folder)) is not None:
        return f'; its download is not finished ({part.name}): run the same hf download again'
    below = checkpoint_below(folder)
    if below is not None:
        return f'; did you mean {below}?'
    adapter = checkpoint_below(folder, has_adapter)
    if adapter is not None:
        return (
            f'; did you mean {adapter}, with --base (the folder of the policy that this adapter, '
            'LoRA, was trained on)?'
        )
    return ''


def _read_shards(index: Path) -> list[StoredTensor]:
    weight_map = read_json(index).mapping('weight_map')
    shards = {name: weight_map.get(name, str) for name in weight_map.values}
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(shards.values())):
        if Path(file).name != file or not file.endswith('.safetensors'):
            _refuse_pickle(Path(file))
            raise CheckpointError(
                f"{index}: shard '{file}' is not the plain name of a safetensors file"
            )
        path = index.parent / file
        if not os.path.lexists(path):
            raise CheckpointError(
                f'{path}: is missing, but {INDEX_FILE} names it; download the folder again, or '
                'copy all of its files'
            )
        for stored in _header(path):
            if shards.get(stored.name) != file:
                raise CheckpointError(
                    f"{path}: holds tensor '{stored.name}', which {INDEX_FILE} places in "
                    f'{shards.get(stored.name, "no file")}'
                )
            found[stored.name] = stored
    lost = [name for name in shards if name not in found]
    if lost:
        shown = join_truncated([f"'{name}'" for name in lost], ', ')
        raise CheckpointError(f'{index}: names tensors that are in no shard: {shown}')
    return list(found.values())
