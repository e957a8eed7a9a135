"""Tiny policies that can be guided, on engines built for two rows and for one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.candidates import Candidate
from vla_runtime.engines.devices import cpu_threads
from vla_runtime.engines.loading import EngineOptions, load_engine
from vla_runtime.engines.protocol import PolicyEngine
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

NOISE = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def write_guided(folder: Path, family: str = 'pi05', **changes) -> Path:
    """pi05 has its state in the prompt, pi0 and smolvla as a token; all have advantage tags."""
    spec = tiny_spec(family, advantage='task_newline', **changes)
    return write_tiny_policy(folder / f'guided {family}', spec)


def without_ages(cache: Mapping[str, str]) -> dict[str, str]:
    """Words of a cache report without the ages of its hits, which are wall time here."""
    return {level: re.sub(r'hit \([\d.]+ s old\)', 'hit', text) for level, text in cache.items()}


def codec_of(bundle: Path) -> PolicyCodec:
    """What turns observations into inputs of the networks, and plans into their actions."""
    return PolicyCodec(read_bundle(bundle, verify=False))


def policy_on_engine(
    bundle: Path, max_rows: int = 2, use_cuda_graphs: bool = False, **settings
) -> tuple[Policy, PolicyEngine]:
    """A policy on a torch engine that was built for so many prompt rows, and the engine."""
    checked = read_bundle(bundle)
    engine = load_engine(
        checked,
        Candidate('torch', 'float32'),
        EngineOptions('cpu', max_rows, cpu_threads(None), use_cuda_graphs),
    )
    return Policy(checked, engine, PolicySettings(**{'rtc_mode': 'guided', **settings})), engine


def load_policy(bundle: Path, max_rows: int = 2, **settings) -> Policy:
    """The same without its engine."""
    return policy_on_engine(bundle, max_rows, **settings)[0]
