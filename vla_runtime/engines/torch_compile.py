"""Words of the option `torch_compile`: networks that are compiled at load.

PyTorch's compiler compiles networks by name. `triton` stands in the place of `denoise`: the layers
of the head in this package's own Triton kernels.

Nothing here imports PyTorch: nodes and tools check the word before they load anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from vla_runtime.engines.preflight import AUTO

# Networks of an engine, in the order in which an inference runs them.
NETWORKS = ('vision', 'prefix', 'denoise')
NONE, ALL, TRITON = 'none', 'all', 'triton'
_PARTS = (*NETWORKS, TRITON)
# No word here is a boolean in YAML, as `on` and `off` are.
WORDS = (
    NONE,
    AUTO,
    ALL,
    *('+'.join(some) for count in (1, 2) for some in combinations(NETWORKS, count)),
    *(
        '+'.join((*some, TRITON))
        for count in range(3)
        for some in combinations(NETWORKS[:2], count)
    ),
)


def check_torch_compile(word: str, backend: str) -> None:
    """Refuse an unknown word, and any but `none` for a backend that PyTorch does not run.

    Args:
        word: value of the option.
        backend: one of `preflight.BACKENDS`, or `auto`, which may come to PyTorch.

    Raises:
        ValueError: says what is allowed.
    """
    if word not in WORDS:
        raise ValueError(f"torch_compile '{word}' is unknown; known are: {', '.join(WORDS)}")
    if word != NONE and backend not in (AUTO, 'torch'):
        raise ValueError(
            f"torch_compile '{word}': backend '{backend}' does not run PyTorch's networks; choose "
            "backend 'torch', or torch_compile 'none'"
        )


def word_for(word: str, backend: str) -> str:
    """Return the word for a backend that `auto` considers; `auto` is `none` without PyTorch.

    Raises:
        ValueError: networks were named that this backend cannot compile.
    """
    word = NONE if word == AUTO and backend != 'torch' else word
    check_torch_compile(word, backend)
    return word


def networks_of(word: str) -> tuple[str, ...]:
    """Return the networks that a word other than `none` lets PyTorch compile."""
    return NETWORKS if word in (AUTO, ALL) else tuple(n for n in NETWORKS if n in word.split('+'))


def tries_triton(word: str) -> bool:
    """Return whether a word other than `none` has the head's layers tried in Triton kernels."""
    return word == AUTO or TRITON in word.split('+')


def word_of(parts: Iterable[str]) -> str:
    """Return the word that names these networks, and `triton` if it is among them."""
    found = tuple(sorted(parts, key=_PARTS.index))
    return ALL if found == NETWORKS else '+'.join(found) or NONE
