"""How well the seconds of a step are predicted for compositions that were never seen.

    OMP_NUM_THREADS=1 python -m bench.costs.compositions [--compositions N] [--turns N]
        [--steps FILE] [--out F]

Batches of random composition (edits, dense members, recordings and members that reuse patches, in
three sizes, guided and not) run on the shipped models in an engine, as on a worker; all of them
once, then again with the same masks and noise, `--turns` times. What each step reports is written
to lines of compositions-MODEL.jsonl; with `--steps` earlier ones are read, and nothing runs.

held_out  fitted to 80 % of the compositions, judged on the steps of the others: mean absolute
          percentage error and R2 of each predictor, in CPU seconds of the computing thread and in
          wall seconds. Of the first turn. `noise` is the error of the median of the steps with
          equal members within a run.
repeats   how well a step is predicted by the very same step in the other turns, minutes apart,
          which no model of compositions can surpass; also with each turn's speed taken out, and in
          units of a fixed piece of work that is timed after each step
least     as held_out, of the least seconds of each step over the turns: what it takes where the
          machine does nothing else
serving   the server's predictor as it serves: each step is predicted, then observed, in the order
          in which they ran, on a machine whose speed is as it was, or changes; and with the
          speed corrected at each eighth step only
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.costs.predictors import errors, predictors
from bench.costs.steps import SIZES, StepSeen, measure
from bench.harness import ROOT, header, write_json
from maskfx.runtime.planner.least_squares import Floats
from maskfx.scheduling.composition import Composition
from maskfx.scheduling.cost_model import COEFFICIENTS, START, FittedCosts, LearnedCosts
from maskfx.scheduling.step_fit import StepFit
from maskfx.scheduling.step_reports import StepMember, Stepped

RESULTS = ROOT / "bench" / "results"
STEPS = "compositions"
MODELS = ("unet", "dit")
HELD_OUT, FOLDS = 0.2, 5
SPEEDS = {"as measured": 1.0, "twice as slow from the middle on": 2.0}
EIGHTH = "followed at each eighth step"

Row = dict[str, Any]
decode = msgspec.json.Decoder(StepSeen).decode


@dataclass(frozen=True)
class Data:
    """Steps, each with the number of its composition and its seconds."""

    runs: list[int]
    steps: list[list[StepMember]]
    seconds: Floats

    @staticmethod
    def of(seen: Sequence[StepSeen], clock: str) -> Data:
        return Data(
            [one.run for one in seen],
            [one.members for one in seen],
            np.array([getattr(one, clock) for one in seen]),
        )

    def of_runs(self, runs: set[int]) -> Data:
        rows = [row for row, run in enumerate(self.runs) if run in runs]
        return Data([self.runs[r] for r in rows], [self.steps[r] for r in rows], self.seconds[rows])


def held_out(data: Data) -> Row:
    """Fit to four fifths of the compositions and judge on the rest, each once held out."""
    runs = sorted(set(data.runs))
    np.random.default_rng(0).shuffle(runs)
    sizes = sorted({m.whole for step in data.steps for m in step})
    said: dict[str, list[Floats]] = defaultdict(list)
    seen: list[Floats] = []
    for fold in range(FOLDS):
        kept = set(runs[fold::FOLDS])
        past, future = data.of_runs(set(runs) - kept), data.of_runs(kept)
        seen.append(future.seconds)
        for name, make in predictors(sizes).items():
            predictor = make()
            predictor.fit(past.steps, past.seconds)
            said[name].append(predictor.predict(future.steps))
    whole = np.concatenate(seen)
    return {name: errors(whole, np.concatenate(parts)) for name, parts in said.items()}


def noise(data: Data) -> float | None:
    """Return the error of the median of the steps with equal members of one composition."""
    groups: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for run, step, took in zip(data.runs, data.steps, data.seconds.tolist(), strict=True):
        groups[run, tuple(sorted((m.kind, m.sites, m.whole) for m in step))].append(took)
    off = [
        abs(took - statistics.median(group)) / took
        for group in groups.values()
        if len(group) > 2
        for took in group
    ]
    return statistics.mean(off) if off else None


def members_key(one: StepSeen) -> tuple[Any, ...]:
    return tuple(sorted((m.kind, m.sites, m.whole, m.samples, m.first) for m in one.members))


def repeated(seen: Sequence[StepSeen]) -> list[list[StepSeen]]:
    """Return the steps with equal members of the same composition that ran in several turns."""
    groups: dict[tuple[Any, ...], list[StepSeen]] = defaultdict(list)
    for one in seen:
        groups[one.run, members_key(one)].append(one)
    return [group for group in groups.values() if len({one.turn for one in group}) > 1]


def repeats(seen: Sequence[StepSeen]) -> Row:
    """Predict each step by the median of the same one in the other turns."""
    groups = repeated(seen)
    found: Row = {"steps": sum(map(len, groups)), "groups": len(groups)}
    units: dict[str, Callable[[StepSeen], float]] = {
        "cpu": lambda one: one.cpu,
        "of the reference": lambda one: one.cpu / one.reference,
    }
    for name, seconds in units.items():
        speed = speeds(groups, seconds)
        plain, scaled = [], []
        for group in groups:
            for one in group:
                took = seconds(one)
                others = [other for other in group if other.turn != one.turn]
                plain.append(abs(statistics.median(map(seconds, others)) - took) / took)
                same = statistics.median(seconds(o) / speed[o.turn] for o in others)
                scaled.append(abs(same * speed[one.turn] - took) / took)
        found[name] = {
            "speeds": {str(turn): value for turn, value in speed.items()},
            "mape": statistics.mean(plain),
            "median": statistics.median(plain),
            "mape_scaled": statistics.mean(scaled),
            "median_scaled": statistics.median(scaled),
        }
    return found


def speeds(
    groups: Sequence[Sequence[StepSeen]], seconds: Callable[[StepSeen], float]
) -> dict[int, float]:
    """Return how many times longer the steps of each turn took than the median of all turns."""
    ratios: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        usual = statistics.median(map(seconds, group))
        for one in group:
            ratios[one.turn].append(seconds(one) / usual)
    return {turn: statistics.median(values) for turn, values in sorted(ratios.items())}


def least(seen: Sequence[StepSeen]) -> list[StepSeen]:
    """Return the quickest of each group of repeated steps."""
    return [min(group, key=lambda one: one.cpu) for group in repeated(seen)]


class EachEighth(LearnedCosts):
    """The served costs, whose speed is corrected when they are fitted, and not between."""

    def _follow(self) -> None:
        return


def serving(data: Data, factor: float, costs: type[LearnedCosts] = LearnedCosts) -> Row:
    """Predict each step before it is observed; judged on the second half."""
    learned, said, seen = costs(START), [], []
    for number, (step, took) in enumerate(zip(data.steps, data.seconds.tolist(), strict=True)):
        late = number >= len(data.steps) / 2
        seconds = took * (factor if late else 1.0)
        if late:
            row = np.array(Composition.of(step))
            said.append(float(row @ np.array(learned.now.coefficients)))
            seen.append(seconds)
        learned.observe(Stepped(seconds, step))
    return errors(np.array(seen), np.array(said))


def judged(name: str, seen: Sequence[StepSeen]) -> Row:
    found: Row = {"model": name, "steps": len(seen), "compositions": len({s.run for s in seen})}
    found["members"] = statistics.mean(len(s.members) for s in seen)
    found["turns"] = len({s.turn for s in seen})
    if repeated(seen):
        found["repeats"] = repeats(seen)
        found["least"] = held_out(Data.of(least(seen), "cpu"))
    first = [one for one in seen if one.turn == 0]
    for clock in ("cpu", "seconds"):
        data = Data.of(first, clock)
        found[clock] = {
            "median": float(np.median(data.seconds)),
            "noise": noise(data),
            "held_out": held_out(data),
            "serving": {title: serving(data, factor) for title, factor in SPEEDS.items()}
            | {f"{t}, {EIGHTH}": serving(data, f, EachEighth) for t, f in SPEEDS.items()},
        }
    return found


def costs_of(name: str, seen: Sequence[StepSeen]) -> FittedCosts:
    """Return the costs of a model's steps in CPU seconds, for the simulator."""
    seen = least(seen) or seen
    fit = StepFit(START.coefficients, len(seen))
    for one in seen:
        fit.add(Composition.of(one.members), one.cpu)
    return FittedCosts(
        **dict(zip(COEFFICIENTS, fit.fit(drift=False), strict=True)),
        around_base=0.05,
        around_per_site=1e-4,
        record=1.1,
        disk_bandwidth=1e9,
        r2=fit.r2,
        origin=(
            f"Steps: fitted to the CPU seconds of {len(seen)} steps of the shipped {name!r} on one "
            "core (bench.costs.compositions). Assumed: around_*, record, disk_bandwidth."
        ),
    )


def tell(row: Row) -> None:
    if "least" in row:
        for unit in ("cpu", "of the reference"):
            own = row["repeats"][unit]
            print(f"{row['model']}, {unit}, the same step: {own['mape']:.1%}, at the turn's speed "
                  f"{own['mape_scaled']:.1%}")  # fmt: skip
        for name, one in row["least"].items():
            print(f"  least     {name:34} {one['mape']:7.1%} {one['r2']:7.3f}")
    for clock in ("cpu", "seconds"):
        own = row[clock]
        print(f"{row['model']}, {clock}: {row['steps']} steps, noise {own['noise']:.1%}")
        for part in ("held_out", "serving"):
            for name, one in own[part].items():
                print(f"  {part:9} {name:34} {one['mape']:7.1%} {one['r2']:7.3f}")


def main(command: Sequence[str] | None = None) -> None:
    given = parse(command)
    result = header("bench.costs.compositions", given.told)
    result |= {"pixels": SIZES, "models": []}
    for name in given.models:
        path = Path(f"{given.steps or STEPS}-{name}.jsonl")
        if given.steps is None:
            measure(name, given.compositions, given.most, given.seed, path, given.turns)
        seen = [decode(line) for line in path.read_bytes().splitlines()]
        result["models"].append(judged(name, seen))
        if given.costs:
            (Path(given.costs) / f"{name}-cpu.json").write_bytes(costs_of(name, seen).to_json())
        tell(result["models"][-1])
        write_json(Path(given.out), result)


def parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.costs.compositions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compositions", type=int, default=60)
    parser.add_argument("--turns", type=int, default=1, help="how often each composition runs")
    parser.add_argument("--most", type=int, default=6, help="requests of a composition, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", help="FILE of FILE-MODEL.jsonl: read, and nothing runs")
    parser.add_argument("--costs", help="a folder; MODEL-cpu.json is written, for bench.simulate")
    parser.add_argument("--out", default=str(RESULTS / "costs-compositions.json"))
    told = list(sys.argv[1:] if command is None else command)
    given = parser.parse_args(told)
    given.told = told
    return given


if __name__ == "__main__":
    main()
