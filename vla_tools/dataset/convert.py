"""Bags to a data set: read, split into episodes, put on a grid, written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from vla_runtime.files.quotes import counted
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.robot.schema import Robot
from vla_tools.dataset.bag_contents import BagContents, read_contents
from vla_tools.dataset.bag_facts import BagFacts, read_facts
from vla_tools.dataset.bag_frames import BagFrames
from vla_tools.dataset.episodes import Grid, PlannedEpisode, plan_episodes
from vla_tools.dataset.layout import (
    FRAME_AGE_S,
    MOST_FPS,
    SHORTEST_S,
    DatasetError,
    DatasetFrame,
    EpisodeFacts,
    Layout,
)
from vla_tools.dataset.writer import DatasetWriter, dataset_folder

# Yields the frames with progress, given their number.
Progress = Callable[[Iterable[DatasetFrame], int], Iterable[DatasetFrame]]
_WHOLE_RATE = 0.01


@dataclass(frozen=True)
class DatasetOptions:
    """Options of a conversion.

    Attributes:
        robot: None: the recorded one.
        namespace: in bags of several; None: the only one.
        only: `judged` or `success`: only such episodes; None: all.
        fps: None: the policy's rate.
        task: of every episode; None: the recorded instructions.
        measured_actions: actions are positions measured at the next frame.
        frame_age_s: largest age of a camera's frame.
        shortest_s: shorter episodes are left out.
    """

    robot: Robot | None = None
    namespace: str | None = None
    only: Literal['judged', 'success'] | None = None
    fps: int | None = None
    task: str | None = None
    measured_actions: bool = False
    frame_age_s: float = FRAME_AGE_S
    shortest_s: float = SHORTEST_S


@dataclass
class Result:
    """Outcome of a conversion.

    Attributes:
        verdicts: by episode; None where nobody judged.
        corrections: frames in which a person led.
        too_short: episodes left out for their length.
        others: episodes left out for their verdict.
        repeated: camera frames shown before.
        damaged: undecodable camera frames.
        faults: first fault of each camera, for a person.
        times: source of message times other than stamps, to number of bags.
        problems: unreadable parts of the bags.
        left_out: unusable bags, with the reason.
    """

    layout: Layout
    episodes: int = 0
    frames: int = 0
    tasks: list[str] = field(default_factory=list)
    verdicts: list[bool | None] = field(default_factory=list)
    corrections: int = 0
    too_short: int = 0
    others: int = 0
    repeated: int = 0
    damaged: int = 0
    faults: list[str] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Lines of text for a person."""
        judged = [verdict for verdict in self.verdicts if verdict is not None]
        fps = self.layout.fps
        lines = [
            f'{counted(self.episodes, "episode")}, {counted(self.frames, "frame")} at {fps} Hz '
            f'({self.frames / fps:.1f} s), {counted(len(set(self.tasks)), "task")}',
            f'judged {len(judged)}, of them successful {sum(judged)}',
        ]
        if self.corrections:
            lines.append(
                f'a person led in {counted(self.corrections, "frame")} '
                f'({self.corrections / fps:.1f} s; column intervention)'
            )
        if '' in self.tasks:
            lines.append('the policy reads no instruction, so the task is empty (--task gives one)')
        shown = self.frames * len(self.layout.cameras)
        if self.repeated:
            lines.append(
                f'{self.repeated} of {shown} camera frames are shown again: the bag has fewer than '
                f"{fps} a second (record_images: 'all' records every one; --fps asks for fewer)"
            )
        if self.damaged:
            lines.append(
                f'{self.damaged} camera frames cannot be decoded: the one before was taken'
            )
        lines += [f'first of them: {fault}' for fault in self.faults]
        if self.too_short:
            stretches = counted(self.too_short, 'stretch', 'stretches')
            lines.append(f'left out as shorter than --shortest: {stretches}')
        if self.others:
            lines.append(
                f'left out for another verdict than --only, or none: '
                f'{counted(self.others, "episode")}'
            )
        unjudged = len(self.verdicts) - len(judged)
        if judged and unjudged:
            lines.append(
                f'no column next.success: not judged {counted(unjudged, "episode")} (--only judged '
                'leaves them out)'
            )
        lines += [f'time: {text} (recordings: {count})' for text, count in self.times.items()]
        lines += [f'problem: {text}' for text in self.problems]
        return lines + [f'left out: {text}' for text in self.left_out]


@dataclass(frozen=True)
class _Bag:
    path: Path
    contents: BagContents
    episodes: list[PlannedEpisode]


def convert(
    paths: Sequence[Path],
    out: Path,
    options: DatasetOptions,
    *,
    force: bool = False,
    progress: Progress = lambda frames, _: frames,
) -> Result:
    """Write a data set of the bags' episodes, in the order of `paths`; complete or not at all.

    Raises ValueError: something is missing in a bag, or the folder cannot be written.
    """
    bags: list[_Bag] = []
    left_out: list[str] = []
    too_short, others, layout = 0, 0, None
    with dataset_folder(out, force=force) as folder:
        for path in paths:
            try:
                contents, robot, grid = _read(path, options, layout.fps if layout else None)
            except ValueError as error:
                left_out.append(str(error))
                continue
            episodes, short = plan_episodes(contents, grid)
            too_short += short
            wanted = [episode for episode in episodes if _is_wanted(episode, options)]
            others += len(episodes) - len(wanted)
            bags.append(_Bag(path, contents, wanted))
            layout = _same_layout(layout, _layout(contents, robot, grid), bags[0].path, path)
        if layout is None:
            raise DatasetError('\n'.join(left_out))
        result = _write(bags, folder, layout, too_short, others, progress)
    result.left_out = left_out
    return result


def _read(
    path: Path, options: DatasetOptions, fps_before: int | None
) -> tuple[BagContents, Robot, Grid]:
    """Read one bag, after a quick look that finds what would refuse it."""
    reader = BagReader(path)
    try:
        facts = read_facts(reader, options.robot, options.namespace)
        grid = _grid(path, facts, options, fps_before)
        contents = read_contents(reader, facts.robot, options.namespace)
        _require_commands(path, contents.missing_outputs, options)
        return contents, facts.robot, grid
    except ValueError as error:
        problems = '; '.join(reader.problems[:3])
        raise DatasetError(f'{error} ({problems})' if problems else str(error)) from None


def _is_wanted(episode: PlannedEpisode, options: DatasetOptions) -> bool:
    if options.only == 'success':
        return episode.success is True
    return options.only is None or episode.success is not None


def _require_commands(path: Path, missing: Sequence[str], options: DatasetOptions) -> None:
    if not options.measured_actions and missing:
        raise DatasetError(
            f'{path}: no command on topic {missing[0]} of the robot file; make actions of the '
            'measured positions with --actions measured'
        )


def _grid(path: Path, facts: BagFacts, options: DatasetOptions, before: int | None) -> Grid:
    _require_commands(path, facts.missing_outputs, options)
    if options.task is None and facts.needs_words and not facts.has_words:
        why = (
            'no topic …/current_instruction or …/instruction says'
            if facts.instructions is None
            else f'topic {facts.instructions} is there, but no text of it says'
        )
        raise DatasetError(f'{path}: {why} what the robot was to do; give it with --task')
    fps = options.fps or before or _policy_rate(path, facts)
    return Grid(
        fps,
        round(options.frame_age_s * 1e9),
        options.shortest_s,
        options.measured_actions,
        '' if options.task is None and not facts.has_words else options.task,
    )


def _policy_rate(path: Path, facts: BagFacts) -> int:
    if facts.step_time_s is None:
        raise DatasetError(
            f'{path}: no action_chunk in it says how long a step is; give the frames a second with '
            '--fps'
        )
    rate = 1.0 / facts.step_time_s
    if abs(rate - round(rate)) > _WHOLE_RATE or not 1 <= round(rate) <= MOST_FPS:
        raise DatasetError(
            f"{path}: the policy's {rate:.4g} steps a second are no whole number up to {MOST_FPS}, "
            'which LeRobot asks for; give another one with --fps'
        )
    return round(rate)


def _layout(contents: BagContents, robot: Robot, grid: Grid) -> Layout:
    state = tuple(name for series in contents.states for name in series.names)
    commanded = tuple(name for series in contents.actions for name in series.names)
    return Layout(
        robot=robot.name,
        fps=grid.fps,
        cameras=dict.fromkeys(contents.frames, (0, 0)),
        state=state,
        action=state if grid.measured_actions else commanded,
        units={
            joint.name: f'{joint.unit}{", continuous" * joint.continuous}' for joint in robot.joints
        },
    )


def _same_layout(first: Layout | None, layout: Layout, before: Path, path: Path) -> Layout:
    if first is None or first == layout:
        return layout
    for joint, unit in layout.units.items():
        other = first.units.get(joint, unit)
        if other != unit:
            raise DatasetError(
                f'{path}: joint {joint} is in {unit} there, and in {other} in {before}: one data '
                'set has one unit. Make one of each, or give one robot file for all with --robot '
                'where both measure alike'
            )
    raise DatasetError(
        f'{path}: it is of another robot than {before}: cameras, joints, commands or steps a '
        'second differ. Give one robot file for all with --robot, and --fps'
    )


def _write(
    bags: Sequence[_Bag],
    folder: Path,
    layout: Layout,
    too_short: int,
    others: int,
    progress: Progress,
) -> Result:
    verdicts = [episode.success for bag in bags for episode in bag.episodes]
    if not verdicts:
        raise DatasetError(
            f'{", ".join(str(bag.path) for bag in bags)}: no episode in which every camera, joint '
            f'and command is there for long enough ({too_short} too short); see --shortest and '
            '--frame-age' + (f'. --only leaves out {others}' if others else '')
        )
    judged = all(verdict is not None for verdict in verdicts)
    led = [episode.intervention for bag in bags for episode in bag.episodes]
    corrected = any(one.any() for one in led)
    result = Result(layout, too_short=too_short, others=others)
    writer: DatasetWriter | None = None
    total = sum(len(episode.times_ns) for bag in bags for episode in bag.episodes)
    done = 0
    for bag in bags:
        frames = BagFrames(bag.contents, bag.episodes)
        for episode in bag.episodes:
            rest = iter(progress(frames.of(episode), total - done))
            done += len(episode.times_ns)
            first = next(rest, None)
            if first is None:
                continue
            if writer is None:
                sizes = {name: one.pixels.shape[:2] for name, one in first.images.items()}
                layout = replace(layout, cameras=sizes, judged=judged, corrected=corrected)
                result.layout, writer = layout, DatasetWriter(folder, layout)
            facts = EpisodeFacts(
                episode.task,
                len(episode.times_ns),
                episode.success,
                str(bag.path),
                int(episode.times_ns[0]),
            )
            writer.write(facts, chain([first], rest))
            result.tasks.append(episode.task)
            result.verdicts.append(episode.success)
            result.corrections += int(episode.intervention.sum())
        result.repeated += frames.repeated
        result.damaged += frames.damaged
        result.faults += frames.faults.values()
        result.times.update(bag.contents.clock.notes)
        result.problems += bag.contents.reader.problems
    if writer is None:
        reasons = '; '.join(result.faults) or 'they are damaged'
        raise DatasetError(f'a camera has no frame that can be decoded: {reasons}')
    writer.finish()
    result.episodes, result.frames = writer.episodes, writer.frames
    return result
