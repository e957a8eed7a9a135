"""Time that the prefix cache saves, on a mid-size policy (100 M parameters, 3 cameras) on a CPU.

In every round, one after the other: a whole inference whose three images are new, one of which a
single image is new, one that finds everything in the cache, and alone the denoise loop. So what
slows the machine slows both sides of a ratio. Targets: a full hit costs at most 1.05 of the
denoise loop alone; one changed camera of three saves at least the vision time of the other two.

That vision time is taken inside the inference that ran all three cameras: the same runs whose
absence is claimed. What is saved then differs from it by what the cache itself costs more or
less (comparing, copying), and by how differently one same camera's run took in two inferences,
which is noise. So what the cache costs is also told on its own, from within one inference: on a
hit beside its denoise loop, with one new camera beside its vision run. The intervals are those of
the median, by bootstrap.

    python benchmark/prefix_cache.py [--rounds 40] [--threads 1]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from measurement import median_interval, percentiles, write_result
from mid_size import (
    CAMERAS,
    PACKAGES,
    denoise_alone,
    look,
    mid_size_policy,
    milliseconds,
    parse_arguments,
)

from vla_runtime.policy import Policy

WORDS = {
    'all_new': ('miss', 'miss', 'miss'),
    'one_new': ('miss', 'hit', 'hit'),
    'hit': ('hit', 'hit', 'hit'),
}


class Measurement:
    """The timed pieces; each leaves the engine's buffers as the cache believes them to be."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._engine = policy._engine
        self._seed = 0
        self._images = [0, 0, 0]
        self._loop = denoise_alone(self._engine)
        self._encode_image = self._engine.encode_image
        self._engine.encode_image = self._timed_encode_image  # type: ignore[method-assign]
        # Of the last inference: milliseconds by phase, and of each run of the vision network.
        self.phases: Mapping[str, float] = {}
        self.encodings: list[float] = []

    def _timed_encode_image(self, camera: int, pixels: np.ndarray) -> None:
        self.encodings.append(milliseconds(lambda: self._encode_image(camera, pixels)))

    def infer(self, kind: str) -> float:
        """One inference of a kind of `WORDS`, milliseconds; what was reused is checked."""
        self.encodings = []
        self._seed += 1
        for camera, word in enumerate(WORDS[kind]):
            if word == 'miss':
                self._images[camera] = self._seed * 10 + camera
        observation = look(0, self._images)
        found: list[Any] = []
        spent = milliseconds(lambda: found.append(self._policy.infer(observation)))
        cache = found[0][1].cache
        assert [one.reuse.value for one in cache.images.values()] == list(WORDS[kind]), cache
        assert cache.prefixes[0].found == (kind == 'hit'), cache
        self.phases = found[0][1].milliseconds
        return spent

    def denoise(self) -> float:
        return milliseconds(self._loop)


def measure(policy: Policy, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every piece, by round."""
    measurement = Measurement(policy)
    found: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        spent: dict[str, float] = {}
        # Each kind is first as often as last; the first round, which is not counted, brings the
        # images that `one_new` finds.
        for kind in ('all_new', 'one_new') if round_ % 2 else ('one_new', 'all_new'):
            if round_ == 0 and kind == 'one_new':
                continue
            spent[kind] = measurement.infer(kind)
            vision = spent[f'{kind}_vision'] = measurement.phases['vision']
            spent[f'{kind}_beside_vision'] = vision - sum(measurement.encodings)
            if kind == 'all_new':
                spent['vision_of_two'] = sum(measurement.encodings[1:])
        for piece in ('denoise', 'hit') * 2 if round_ % 2 else ('hit', 'denoise') * 2:
            # Twice: the shorter a piece, the more a single disturbance weighs.
            again = measurement.denoise() if piece == 'denoise' else measurement.infer('hit')
            if piece == 'hit' and again < spent.get('hit', np.inf):
                spent['hit_denoise'] = measurement.phases['denoise']
                spent['hit_beside_denoise'] = again - spent['hit_denoise']
            spent[piece] = min(spent.get(piece, np.inf), again)
        if round_:
            for piece, value in spent.items():
                found.setdefault(piece, []).append(value)
    return found


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios within a round, and each piece's times."""
    times = {piece: np.array(values) for piece, values in found.items()}
    two = times['vision_of_two']
    ratios = {
        'hit_over_denoise': (times['hit'] / times['denoise'], 1.05),
        'cost_of_hit_over_denoise': (times['hit_beside_denoise'] / times['hit_denoise'], 0.05),
        # The phase in which the inferences differ, and the whole of them: prefix and denoise loop
        # are the same work in both, and their noise is as large as what is saved.
        'saved_in_vision_over_vision_of_two': (
            (times['all_new_vision'] - times['one_new_vision']) / two,
            1.0,
        ),
        'saved_over_vision_of_two': ((times['all_new'] - times['one_new']) / two, 1.0),
        # Below zero, a camera's hit costs less than what its miss does beside the network's run.
        'cost_of_reuse_over_vision_of_two': (
            (times['one_new_beside_vision'] - times['all_new_beside_vision']) / two,
            0.0,
        ),
    }
    return {
        **{
            name: {**percentiles(ratio), 'median_95': median_interval(ratio), 'target': target}
            for name, (ratio, target) in ratios.items()
        },
        'ms': {piece: {'min': float(v.min()), **percentiles(v)} for piece, v in times.items()},
    }


def main() -> None:
    arguments = parse_arguments(__doc__, rounds=40)
    with mid_size_policy(arguments.threads) as policy:
        figures = summary(measure(policy, arguments.rounds))
    for name, ratio in figures.items():
        if name == 'ms':
            continue
        low, high = ratio['median_95']
        print(
            f'{name:36s} median {ratio["median"]:7.4f} [{low:.4f}, {high:.4f}]   '
            f'target {ratio["target"]}'
        )
    figures = {'cameras': len(CAMERAS), 'threads': arguments.threads, **figures}
    print('wrote', write_result('prefix_cache', figures, PACKAGES, arguments.json))


if __name__ == '__main__':
    main()
