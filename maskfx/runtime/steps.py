"""The kinds of members of a step (edit, recording, dense call), and a validated member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from maskfx.compiler.compile import Compilation
from maskfx.ir.geometry.grids import mask_shape
from maskfx.ir.listed import Join
from maskfx.ir.programs.program import Program
from maskfx.runtime.cache.rolling.rolling_cache import RollingCache
from maskfx.runtime.cache.step_cache import StepCache
from maskfx.runtime.lora.adapter import Updates
from maskfx.runtime.lora.layers import AdapterSet
from maskfx.runtime.lora.sent import SentLayers
from maskfx.runtime.sites.mask import Mask
from maskfx.runtime.sites.stretch_choice import StretchChoice


@dataclass(eq=False)
class SplitRun:
    """Identifies one denoiser call of a request, in all its steps, to ranks that hold its rows.

    Args:
        reads: The number of steps that read rows of the step before.
    """

    reads: int = 0
    _watchers: list[Callable[[SplitRun], None]] = field(default_factory=list)
    _others: list[SplitRun] = field(default_factory=list)

    def samples(self, count: int) -> list[SplitRun]:
        """Return what identifies each sample of the call where they run one by one: first, itself.

        All of them end with the request.
        """
        self._others += [SplitRun() for _ in range(count - 1 - len(self._others))]
        return [self, *self._others[: count - 1]]

    def watch(self, ended: Callable[[SplitRun], None]) -> None:
        """Call a function once, when the request ends."""
        self._watchers.append(ended)

    def close(self) -> None:
        """End the request: let the ranks free its rows."""
        watchers, self._watchers = self._watchers, []
        for ended in watchers:
            ended(self)
        for other in self._others:
            other.close()


@dataclass(frozen=True)
class LateExchange:
    """Lets a member that is divided over ranks read their rows of the step before.

    Each rank computes with its rows of this step and the others' of step `step - 1`, if it was
    divided in the same way; else with those of this step. Other executors ignore it.

    Args:
        run: The call, the same in each step.
        step: The number of the step.
        waits: Read this step's rows, and hold them for the next step.
    """

    run: SplitRun
    step: int
    waits: bool = False


@dataclass(frozen=True)
class EditStep:
    """Computes the masked sites only and reads the rest from `cache`.

    Args:
        inputs: The denoiser's arguments by name.
        mask: Boolean, True = edit: (height, width) of the latent, or (tokens,) for packed inputs.
            Of pictures that differ in size, (sites,): those of one picture after another.
        cache: The recording of this step.
        any_step: Accept a cache that was recorded at another timestep.
        plan: For a region of keys and values, by its number in `CompiledDenoiser.regions`: the
            sites that it computes from loaded inputs, a mask that covers `mask`. A region that
            isn't named computes the masked sites.
        wide: For a stretch (consecutive blocks), by its number in `CompiledDenoiser.stretches`:
            the sites that it computes; wider or narrower than `mask`, or disjoint from it. A
            stretch that isn't named computes the masked sites. Sites that it doesn't compute have
            their cached rows there, also where they are masked. Where a later stretch has sites
            that the one before it lacks, it starts from the values cached between the two. Any
            choice changes the picture. The output is computed at masked sites only. Stretches that
            compute all sites from the first on load nothing.
        record: Replace the rows of `cache`, a `RollingCache`, where this step computes them; then
            the next step of the request reads this one's.
        adapters: Low-rank updates of the module's layers for this member; they add up. `cache` may
            have been recorded without some of them: then the rows that are read from it don't have
            them either.
        late: Lets ranks read each other's rows of the step before; None makes them wait.
        choice: Chooses the sites of all stretches while the step runs, in place of `wide`; needs
            `record` and a cache that compares what stretches read.
        rows: Return the computed rows alone (`OutputRows`) in place of each output that has more.
        then: The recording that the request's next step reads. Ranks begin to read its rows in a
            store once they have those of `cache`. Other executors ignore it.
    """

    inputs: Mapping[str, object]
    mask: Tensor
    cache: StepCache
    any_step: bool = False
    plan: Mapping[int, Tensor] = field(default_factory=dict)
    wide: Mapping[int, Tensor] = field(default_factory=dict)
    record: bool = False
    adapters: Updates = ()
    late: LateExchange | None = None
    choice: StretchChoice | None = None
    rows: bool = False
    then: StepCache | None = None


@dataclass(frozen=True)
class RecordStep:
    """Computes all sites and records what later edits need, with `adapters` if there are any.

    Ranks wait for each other's rows, so that a recording is exact.
    """

    inputs: Mapping[str, object]
    adapters: Updates = ()


@dataclass(frozen=True)
class DenseStep:
    """Computes all sites and records nothing; with `adapters` if there are any.

    With `late`, ranks may read each other's rows of the step before.
    """

    inputs: Mapping[str, object]
    adapters: Updates = ()
    late: LateExchange | None = None


AnyStep = EditStep | RecordStep | DenseStep


def sent_layers(steps: Iterable[AnyStep]) -> Iterator[SentLayers]:
    """Yield the updates of all adapters of steps as they are sent to another process."""
    for step in steps:
        for one in step.adapters:
            if isinstance(one.layers, SentLayers):
                yield one.layers


def is_fixed(step: AnyStep) -> bool:
    """Return True for an edit whose cached rows no earlier step replaces."""
    return isinstance(step, EditStep) and not isinstance(step.cache, RollingCache)


def late_exchange(step: AnyStep) -> LateExchange | None:
    """Return how a step's exchanges may be late; None for one whose ranks wait."""
    return None if isinstance(step, RecordStep) else step.late


def with_late(step: AnyStep, late: LateExchange | None) -> AnyStep:
    """Return a step whose exchanges may be late; one that records waits."""
    return step if isinstance(step, RecordStep) else replace(step, late=late)


def without_late(step: AnyStep) -> AnyStep:
    """Return a step as it is sent to other processes."""
    return with_late(step, None)


@dataclass(frozen=True, eq=False)
class ValidatedInputs:
    """A call's arguments, flattened, with their sizes and the compilation that serves them.

    Args:
        values: The arguments.
        spec: Their structure.
        sizes: Their sizes by role.
        compilation: What serves the call.
        samples: The arguments of each sample, if it runs as one call per sample.
        join: How its results follow from those of its samples.
        pictures: The mask's shape for each sample's picture, where they differ.
    """

    values: list[Any]
    spec: pytree.TreeSpec
    sizes: dict[str, int]
    compilation: Compilation
    samples: tuple[ValidatedInputs, ...] = ()
    join: Join = Join()
    pictures: tuple[tuple[int, ...], ...] = ()

    @property
    def program(self) -> Program | None:
        """Return the program that computes the call, or each of its samples."""
        return (self.samples[0] if self.samples else self).compilation.program

    @cached_property
    def program_code(self) -> str:
        """Return the program code that a recording of this call carries."""
        program = self.program
        return f"dense {self.spec}" if program is None else program.code

    @cached_property
    def stacks_results(self) -> bool:
        """Whether its results are lists with an item per sample, stacked in its recording."""
        spec = self.samples[0].compilation.capture.out_spec if self.samples else None
        return self.join.items is list and spec is not None and has_list(spec)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Return a mask's shape for these inputs: (height, width) of the latent, or (tokens,).

        A video's has its frames first. Sites of pictures that differ in size form one vector.
        """
        return (sum(map(prod, self.pictures)),) if self.pictures else mask_shape(self.sizes)

    @cached_property
    def differ(self) -> bool:
        """Whether its samples have programs or picture sizes of their own."""
        alike = not self.pictures and self.join in (Join(), Join(list))
        codes = {one.program_code for one in self.samples}
        return bool(self.samples) and not (alike and len(codes) == 1)

    @cached_property
    def latent(self) -> Tensor:
        leaves = zip(self.values, self.compilation.capture.leaves, strict=True)
        found: Tensor = next(v for v, f in leaves if f.step and f.tensor and v.dim() >= 3)
        return found

    @cached_property
    def constants(self) -> list[object]:
        """Return the arguments that aren't tensors, among them the picture's sizes."""
        if self.differ:
            return [*(one.constants for one in self.samples), *map(list, self.pictures)]
        leaves = zip(self.compilation.capture.leaves, self.values, strict=True)
        found = [v for leaf, v in leaves if not leaf.tensor and leaf.argument != "return_dict"]
        return [*found, *(list(shape) for shape in self.pictures)]

    def step_arguments(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of the arguments that identify the step (timestep, sigma)."""
        leaves = self.compilation.capture.leaves
        return [
            (leaf.path, v)
            for leaf, v in zip(leaves, self.values, strict=True)
            if leaf.tensor
            and leaf.step
            and ("timestep" in leaf.path or leaf.path in ("t", "sigma"))
            and v.dim() <= 1
        ]

    def unflatten(self, flat: Sequence[object]) -> object:
        """Return the leaves of a captured graph's result in the module's structure."""
        capture = self.compilation.capture
        assert capture.out_spec is not None, "a capture without a graph has no results"
        return capture.structured(flat)

    def recording(
        self, output: list[object], weights: str, given: Sequence[object] = ()
    ) -> StepCache:
        """Return a recording of this call without rows; `given` are the inputs to keep."""
        return StepCache(
            self.program_code,
            dict(self.sizes),
            self.latent.dtype,
            output,
            {name: value.clone() for name, value in self.step_arguments()},
            weights,
            list(self.constants),
            given=list(given),
        )


def has_list(spec: pytree.TreeSpec) -> bool:
    return spec.type is list or any(map(has_list, spec.children()))


@dataclass(frozen=True, eq=False)
class ValidatedCall:
    """A member of a step that fits the denoiser.

    Args:
        step: The member.
        inputs: Its arguments.
        mask: The mask of an edit.
        regions: The masks of the regions of an edit that compute other sites.
        adapters: Its adapters, checked; None without any.
        parts: The members that compute its samples, where these have programs or sizes of their
            own.
    """

    step: AnyStep
    inputs: ValidatedInputs
    mask: Mask | None = None
    regions: Mapping[int, Mask] = field(default_factory=dict)
    adapters: AdapterSet | None = None
    parts: tuple[ValidatedCall, ...] = ()

    def recording(
        self, output: list[object], weights: str, given: Sequence[object] = ()
    ) -> StepCache:
        """Return a recording of this call without rows; `given` are the inputs to keep."""
        found = self.inputs.recording(output, weights, given)
        found.adapters = () if self.adapters is None else self.adapters.digests
        return found

    @property
    def has_rows(self) -> bool:
        """Whether a program computes the call at some sites."""
        return self.inputs.program is not None and not self.edits_nothing

    @property
    def edits_nothing(self) -> bool:
        if self.mask is None or not self.mask.is_empty:
            return False
        return self.written is None or all(sites.is_empty for sites in self.regions.values())

    @property
    def written(self) -> RollingCache | None:
        """Return the cache that this member replaces the rows of."""
        step = self.step
        if not isinstance(step, EditStep) or not step.record:
            return None
        return step.cache if isinstance(step.cache, RollingCache) else None

    @property
    def choice(self) -> StretchChoice | None:
        """Return what chooses the sites of stretches while the step runs."""
        return self.step.choice if isinstance(self.step, EditStep) else None

    @property
    def narrow_mask(self) -> Mask | None:
        """Return the mask, or None if all sites are computed, in all regions."""
        if self.mask is None:
            return None
        full = self.mask.is_full and all(sites.is_full for sites in self.regions.values())
        return None if full else self.mask
