"""Dimensions of a policy, read off its tensors by what the dataclass itself declares.

Some numbers show in no shape, since a projection is as wide as its heads together: head counts are
those of published networks of the same width, or the user is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import count_image_places
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.family.dimensions import DimField, Part, Share, Shown, dim_fields
from vla_runtime.family.listing import find_family
from vla_runtime.files.json_file import JsonMapping

# (cameras, prompt_length, horizon) to dimensions; prompt_length is 0 without language.
MakeDims = Callable[[int, int, int], PolicyDims]
# Values of fields by their place, `vision.num_heads`; a function makes one of the other values.
Given = Mapping[str, Any]

# Heads of a field: the option that gives them and its name in `ExportOptions`, what is divided by
# them, and the question for them. Other fields have `--heads part=N`.
_OPTIONS = {
    'vision.num_heads': (
        *('--vision-heads', 'vision_heads'),
        *('the vision tower', "the vision tower's attention heads"),
    ),
    'language.num_kv_heads': (
        *('--kv-heads', 'kv_heads'),
        *("the language model's attention", "the language model's key/value heads"),
    ),
    'text.num_heads': (
        *('--kv-heads', 'kv_heads'),
        *('the text transformer', "the text transformer's attention heads"),
    ),
}


@dataclass(frozen=True)
class Heads:
    """Heads of published networks by their width, and one of them as an example for the user."""

    published: Mapping[int, int]
    example: str = ''


class Shapes:
    """Tensor shapes by our names behind a prefix; a missing tensor is an error."""

    def __init__(self, tensors: Mapping[str, StoredTensor], prefix: str = '') -> None:
        self._tensors, self._prefix = tensors, prefix

    def __call__(self, name: str, *axes: int) -> tuple[int, ...]:
        name = f'{self._prefix}{name}'
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"the checkpoint has no tensor for '{name}': is it whole, and of the policy that "
                'its configuration says?'
            )
        if len(stored.shape) not in axes or 0 in stored.shape:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)} where "
                f'{" or ".join(map(str, axes))} axes are expected'
            )
        return stored.shape

    def __contains__(self, name: object) -> bool:
        return f'{self._prefix}{name}' in self._tensors

    def stored(self, name: str) -> str:
        """File, name and shape of a tensor that is there, for messages."""
        found = self._tensors[f'{self._prefix}{name}']
        return f"{found.path}: tensor '{found.name}' of shape {list(found.shape)}"

    def has_any(self) -> bool:
        return any(name.startswith(self._prefix) for name in self._tensors)

    def under(self, prefix: str) -> Shapes:
        return Shapes(self._tensors, f'{self._prefix}{prefix}')

    def depth(self, stack: str) -> int:
        """Number of blocks of a stack, '' for that of the prefix; CheckpointError: one missing."""
        prefix = f'{self._prefix}{stack}.' if stack else self._prefix
        numbers = {
            name.removeprefix(prefix).split('.')[0]
            for name in self._tensors
            if name.startswith(prefix)
        }
        indices = {int(number) for number in numbers if number.isdecimal()}
        if not indices or max(indices) + 1 != len(indices):
            lost = next(index for index in range(len(indices) + 1) if index not in indices)
            raise CheckpointError(f"the checkpoint has no tensors for '{prefix}{lost}'")
        return len(indices)


class ShownDims:
    """Dimensions that the tensors of a checkpoint show.

    Attributes:
        values: by the place of the field, those that were given among them.
        places: those of all fields of what is there.
        stated: place of each field that something else states too, with the name of that.

    Raises CheckpointError: tensors that are missing or contradict each other.
    """

    def __init__(
        self, dims: type, tensors: Mapping[str, StoredTensor], given: Given | None = None
    ) -> None:
        self._dims = dims
        self.values = {place: value for place, value in (given or {}).items() if value is not None}
        self.places: set[str] = set()
        self.stated: dict[str, str] = {}
        self.shares: dict[str, tuple[Share, int]] = {}
        # Where each tensor of a share is stored, in words.
        self._stored: dict[str, str] = {}
        self._alike: dict[str, str] = {}
        _as_checkpoint_error(lambda: self._read(dims, Shapes(tensors), ''))

    def _read(self, dims: type, shape: Shapes, path: str) -> None:
        for one in dim_fields(dims):
            place = f'{path}{one.name}'
            self.places.add(place)
            if place in self.values:
                continue
            if one.part is not None:
                self._read_part(one, one.part, shape, place)
            for note in one.notes:
                if isinstance(note, Shown):
                    self.values[place] = note.read(shape)
                    if note.stated:
                        self.stated[place] = note.stated
                elif isinstance(note, Share):
                    self.shares[place] = note, shape(note.tensor, 2)[0]
                    self._stored[place] = shape.stored(note.tensor)

    def _read_part(self, one: DimField, part: type, shape: Shapes, place: str) -> None:
        note = next((note for note in one.notes if isinstance(note, Part)), Part(f'{one.name}.'))
        below = shape.under(note.prefix)
        if one.optional and not below.has_any():
            self.values[place] = None
            return
        if note.kv_heads_of:
            self._alike[f'{place}.num_kv_heads'] = f'{note.kv_heads_of}.num_kv_heads'
        self._read(part, below, f'{place}.')

    def divided_by(self, place: str) -> tuple[int, bool]:
        """Return the length that a field's heads divide, and whether into even shares."""
        part, _, name = place.rpartition('.')
        for other, (share, length) in self.shares.items():
            if other.startswith(f'{part}.') and share.among == name:
                return length, share.even
        return self.values[f'{part}.width'], False

    def make(self, **further: Any) -> Any:
        """Make the dimensions of what is shown, given and further known.

        Raises CheckpointError: sizes that do not fit each other.
        """
        values = {**self.values, **further}
        for place, other in self._alike.items():
            values.setdefault(place, values[other])
        for place, value in values.items():
            if callable(value):
                values[place] = value(values)
        return _as_checkpoint_error(lambda: self._build(self._dims, '', values))

    def _build(self, dims: type, path: str, values: dict[str, Any]) -> Any:
        found = {}
        for one in dim_fields(dims):
            place = f'{path}{one.name}'
            if place in self.shares:
                self._share(place, path, values)
            if place in values:
                found[one.name] = values[place]
            elif one.part is not None:
                found[one.name] = self._build(one.part, f'{place}.', values)
            elif one.required:
                raise CheckpointError(
                    f"neither the tensors nor the folder's configuration show '{place}'"
                )
        return dims(**found)

    def _share(self, place: str, path: str, values: dict[str, Any]) -> int:
        """Divide a tensor's length by another field, which may be a share itself."""
        if place not in self.shares:
            return int(values[place])
        share, length = self.shares[place]
        among = self._share(f'{path}{share.among}', path, values)
        if length % among:
            beside = self._stored.get(f'{path}{share.among}')
            raise CheckpointError(
                f'{self._stored[place]} does not divide by {path}{share.among}, {among}'
                + (f' ({beside})' if beside else ', as the configuration says or as it was given')
            )
        values[place] = length // among
        return length // among


def _as_checkpoint_error(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f'the checkpoint contradicts itself: {error}') from None


def read_dims(
    tensors: Mapping[str, StoredTensor],
    facts: Draft,
    options: ExportOptions,
    missing: MissingFacts,
    *,
    heads: Mapping[str, Heads],
    given: Given,
    config: JsonMapping | None = None,
) -> MakeDims | None:
    """Return a maker of the dimensions that the tensors show; None once one is missing.

    Args:
        heads: of the fields that no tensor shows.
        given: values of further ones; of `heads` those that the folder states.
        config: configuration, of whose keys some state sizes too.

    Raises CheckpointError: tensors that are missing or contradict each other; `MakeDims` too.
    """
    family = find_family(facts.family)
    shown = ShownDims(family.dims, tensors, given)
    _check_stated(shown, facts, config, missing)
    settled = [_settle_heads(shown, place, heads[place], options, missing) for place in heads]
    tokenizer = facts.tokenizer or options.tokenizer
    has_places = any(one.name == 'image_places' for one in dim_fields(family.dims))
    # The exporter asks for a tokenizer itself.
    if not all(settled) or (has_places and not (tokenizer and tokenizer.is_file())):
        return None

    def make(cameras: int, prompt_length: int, horizon: int) -> PolicyDims:
        places = {}
        if has_places and tokenizer is not None:
            (layout,) = family.templates.values()
            layout = layout.filled(facts.prompt_words)
            found = count_image_places(tokenizer, layout, cameras, prompt_length)
            places = {'image_places': found}
        dims: PolicyDims = shown.make(
            cameras=cameras, prompt_length=prompt_length, horizon=horizon, **places
        )
        return dims

    return make


def _check_stated(
    shown: ShownDims, facts: Draft, config: JsonMapping | None, missing: MissingFacts
) -> None:
    """Note sizes that differ between the folder's statements and the tensors."""
    stated = {
        'image size': facts.image_size,
        'chunk_size': facts.horizon,
        'action dimensions': facts.action_dim,
        'actions without padding': facts.action_length,
        'state dimensions': facts.state_dim,
        'state without padding': facts.state_length,
        'environment state dimensions': facts.environment_length,
    }
    for place, name in shown.stated.items():
        found = shown.values[place]
        said = stated[name] if name in stated else config.value(name) if config else None
        check_stated(
            missing,
            facts.image_size_key if name == 'image size' else name,
            said,
            list(found) if isinstance(found, tuple) else found,
        )


def renamed(
    tensors: Mapping[str, StoredTensor], before: str, after: str
) -> dict[str, StoredTensor]:
    """Return tensors with another prefix in place of one."""
    return {
        after + name.removeprefix(before) if name.startswith(before) else name: stored
        for name, stored in tensors.items()
    }


def check_stated(missing: MissingFacts, name: str, said: object, found: object) -> None:
    """Note a size that the folder says otherwise than its tensors; None: it says nothing."""
    if said is not None and said != found:
        missing.conflict(
            f'config.json or the statistics say {name} {said} but the tensors show {found}'
        )


def _settle_heads(
    shown: ShownDims, place: str, known: Heads, options: ExportOptions, missing: MissingFacts
) -> bool:
    """Find the heads of one field; False once they are asked for, or do not divide their width."""
    if place not in shown.places:
        # A stack that the policy does without.
        return True
    part = place.rpartition('.')[0]
    divided, even = shown.divided_by(place)
    width = shown.values.get(f'{part}.width', divided)
    option, key, what, wanted = _OPTIONS.get(
        place, (f'--heads {part}=N', '', f"'{part}'", f"attention heads of '{part}'")
    )
    asked: int | None = getattr(options, key) if key else options.heads.get(part)
    heads = missing.pick(
        option,
        asked,
        shown.values.get(place, known.published.get(width)),
        f'{wanted} ({known.example})' if known.example else f'{wanted}, {width} numbers wide',
    )
    shown.values[place] = heads
    fits = [n for n in range(1, divided + 1) if divided % (2 * n if even else n) == 0]
    if asked is not None and asked not in fits:
        missing.conflict(
            f'{option} says {asked}, but {what} only divides into {", ".join(map(str, fits))} heads'
        )
    return heads is not None
