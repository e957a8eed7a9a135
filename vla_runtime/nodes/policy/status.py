"""Report of each inference, and status of the policy node in between."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from vla_runtime.bundle.schema import earlier_name
from vla_runtime.files.quotes import join_truncated
from vla_runtime.inference.request import cache_words
from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.messages.images import content_id
from vla_runtime.nodes.policy.description import CONTENT, MEASURED
from vla_runtime.nodes.policy.robot_policy import Answer
from vla_runtime.remote.policy import RemotePolicy
from vla_runtime.robot.schema import StampSource
from vla_runtime.sensors.synchronizer import CameraStatus, MissingInput

# What a person has to give before anything can run; all else is something that went wrong.
_AWAITED = ('instruction', 'clock')


def report(
    answer: Answer,
    parameters: Mapping[str, Any],
    overhead_ms: float,
    by_content: Collection[str] = (),
    discarded: int = 0,
) -> StatusItem:
    """Return the report of one chunk; with the topics' messages it can be inferred again.

    Args:
        overhead_ms: see `Answer.overhead_ms`.
        by_content: cameras whose frames are stamped when they are received: these stamps are in no
            message, and their content names them.
        discarded: inferences since the last report whose chunks were not published, because the
            instruction had changed.
    """
    inner, plan, request, seen = answer.report, answer.plan, answer.request, answer.selection
    frames = {} if seen is None else seen.frames
    measured = () if seen is None else seen.state
    values: dict[str, object] = {
        'episode': request.episode,
        'number': inner.number,
        'stamp_ns': answer.header.observation_ns,
        # A request is sent again under its number with a newer plan: its stamp names the message.
        'request': '' if request.request is None else request.request,
        'request.stamp_ns': request.stamp_ns,
        'request.certain': request.certain,
        'request.rows': len(request.rows),
        'state': _numbers(answer.observation.state),
        MEASURED: _numbers(measured),
        'instruction': answer.observation.instruction,
        'seed': inner.seed,
        'beta': inner.beta,
        'guidance': inner.guidance,
        'denoise_steps': inner.denoise_steps,
        'tokens': ' '.join(map(str, inner.tokens)),
        'rtc_mode': inner.rtc_mode,
        'rtc_clean_steps': inner.clean_steps,
        'tied': answer.header.tied,
        'plan_rows': 0 if plan is None else len(plan.actions),
        'plan_delay_steps': 0 if plan is None else plan.delay_steps,
        'pipeline': inner.pipeline,
        'overlap_ms': inner.overlap_ms,
        'ticks': inner.ticks,
        'answers_per_s': '' if inner.answers_per_s is None else inner.answers_per_s,
        'overhead_ms': overhead_ms,
        'discarded': discarded,
    }
    for ago, state in enumerate(answer.observation.earlier_states, start=1):
        values[earlier_name('state', ago)] = _numbers(state)
    for ago, (_, before) in enumerate(() if seen is None else seen.earlier_states, start=1):
        values[earlier_name(MEASURED, ago)] = _numbers(before)
    values |= {f'ms.{phase}': float(value) for phase, value in inner.milliseconds.items()}
    ages = {source: answer.now_ns - stamp for source, stamp in inner.stamps_ns.items()}
    values |= {f'age_ms.{source}': age_ns * 1e-6 for source, age_ns in ages.items()}
    values |= {f'stamp_ns.{source}': stamp for source, stamp in inner.stamps_ns.items()}
    values |= {f'{CONTENT}{name}': content_id(frames[name].message) for name in by_content}
    values |= {f'cache.{level}': words for level, words in cache_words(inner.cache).items()}
    values |= {f'cache.camera.{name}': one.reuse.value for name, one in inner.cache.images.items()}
    values['cache.rows'] = ' '.join(one.reuse.value for one in inner.cache.prefixes)
    values |= {f'runs.{network}': count for network, count in inner.runs.items()}
    values |= {f'cuda_graph.{network}': state for network, state in inner.cuda_graph.items()}
    values |= {f'parameter.{name}': value for name, value in parameters.items()}
    text = f'chunk {inner.number}: {inner.milliseconds["total"]:.1f} ms'
    return StatusItem('inference report', Level.OK, text, values)


def _numbers(values: Iterable[float]) -> str:
    return ' '.join(repr(float(number)) for number in values)


def observation(missing: Iterable[MissingInput]) -> StatusItem:
    missing = tuple(missing)
    if not missing:
        return StatusItem('observation', Level.OK, 'complete and fresh')
    only_awaited = all(item.source in _AWAITED for item in missing)
    return StatusItem(
        'observation',
        Level.WARN if only_awaited else Level.ERROR,
        'no inference: ' + join_truncated(dict.fromkeys(i.text for i in missing), '; ', 2),
        {f'refused.{item.source}': item.text for item in missing},
    )


def server(policy: RemotePolicy, news: str = '') -> StatusItem:
    """Say whether the policy's server can be asked; `news` is what has just become of it."""
    contract, why = policy.contract, policy.why_away
    values = {
        'server': policy.url,
        'mode': 'away' if why else 'connected',
        'policy': policy.spec.name,
        'bundle_sha256': contract.bundle_sha256,
        'backend': contract.backend,
        'device': contract.device,
        'precision': contract.precision,
        'session_id': policy.session_id,
        'network_ms': policy.network_ms,
        'reconnects': policy.reconnects,
    }
    if why:
        return StatusItem('server', Level.ERROR, why, values)
    return StatusItem('server', Level.OK, news or f'connected to {policy.url}', values)


def requests(several: str) -> StatusItem:
    """`several` names more than one executor."""
    if not several:
        return StatusItem('requests', Level.OK, 'at most one node asks for chunks')
    text = f'{several}; run one executor with one policy, each pair in a namespace of its own'
    return StatusItem('requests', Level.WARN, text)


def camera(status: CameraStatus, stamp: StampSource) -> StatusItem:
    """Say whether a camera can be used, and what became of its frames, which `stamp` dates."""
    counters = status.counters
    values = {
        'topic': status.topic,
        'stamp': stamp,
        'rate_hz': status.rate_hz,
        'age_ms': '' if status.age_s is None else 1e3 * status.age_s,
        'received': counters.received,
        'lost': counters.lost,
        'late': counters.late,
        'out_of_order': counters.out_of_order,
        'refused': counters.refused,
        'outages': counters.outages,
    }
    if status.problem is not None:
        level = Level.WARN if status.usable else Level.ERROR
        return StatusItem(f'camera {status.name}', level, status.problem, values)
    text = f'{status.rate_hz:.1f} Hz, {counters.lost} lost, {counters.late} late'
    if stamp == 'receive':
        text += '; stamped when received'
    return StatusItem(f'camera {status.name}', Level.OK, text, values)


def joints(
    problems: Iterable[str],
    warnings: Iterable[str],
    clock_jumps: int,
    received: Sequence[str] = (),
) -> StatusItem:
    """Report the measured state.

    Args:
        problems: why joints cannot be used.
        warnings: faults of joints that are used nevertheless.
        clock_jumps: count of the times that the ROS clock went back.
        received: topics whose messages are stamped when they are received.
    """
    stamped = ', '.join(received)
    values = {'clock_jumps': clock_jumps, 'stamped_when_received': stamped}
    if text := _together(problems):
        return StatusItem('joint states', Level.ERROR, text, values)
    if text := _together(warnings):
        return StatusItem('joint states', Level.WARN, text, values)
    text = 'all joints are measured' + (f'; stamped when received: {stamped}' if stamped else '')
    return StatusItem('joint states', Level.OK, text, values)


def _together(problems: Iterable[str]) -> str:
    """Join problems, each once: joints of one topic often have the same."""
    return '; '.join(dict.fromkeys(problems))
