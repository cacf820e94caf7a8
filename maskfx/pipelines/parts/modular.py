"""Modular pipelines of diffusers: blocks that share a state, in place of one call with arguments.

A modular pipeline takes the inputs of its blocks as arguments. Its result is the blocks' state, of
which a call may name the values that it wants (`output=`). Its initial latents are in the state
when the block that loops over the steps begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

from maskfx.errors import InputError
from maskfx.pipelines.deferred import force_all
from maskfx.pipelines.parts.pipeline import Pipeline, attributes_of

LOGGER = "diffusers.modular_pipelines.modular_pipeline"  # where blocks log the errors they raise
BLOCKS = "_blocks"  # diffusers' attribute of a modular pipeline
MADE = ("images", "videos")  # the state's names of finished pictures, or of finished videos
LATENTS = "latents"
Prepare = Callable[[Any, int | None, int | None], Any]  # of initial latents, height, width


class State(Protocol):
    """What the blocks of a pipeline share: values by name, and names by groups of arguments."""

    values: dict[str, Any]
    kwargs_mapping: Mapping[str, Sequence[str]]


class Value(Protocol):
    """An input or output of a block: a value by its name, or a group of values without one."""

    name: str | None
    default: object
    kwargs_type: str | None


class Block(Protocol):
    """A block, which may consist of others."""

    sub_blocks: Mapping[str, Block]

    @property
    def inputs(self) -> Sequence[Value]: ...

    @property
    def outputs(self) -> Sequence[Value]: ...

    def __call__(self, components: object, state: State) -> tuple[object, State]: ...


def blocks_of(pipe: object) -> Block | None:
    """Return the blocks of a modular pipeline; None for any other."""
    blocks: Any = attributes_of(pipe).get(BLOCKS)
    return blocks if hasattr(blocks, "sub_blocks") and hasattr(blocks, "inputs") else None


def call_of_blocks(pipe: Pipeline, original: Callable[..., Any]) -> Callable[..., BlocksResult]:
    """Return a modular pipeline's `__call__` with its blocks' inputs as parameters.

    It returns all of the state. Arguments that no block takes are left to diffusers' warning.
    """

    @functools.wraps(original)
    def __call__(self: object, *args: object, **given: object) -> BlocksResult:
        bound = inspect.signature(original).bind(self, *args, **given)
        bound.arguments.pop("output", None)
        state = original(*bound.args, **bound.kwargs)
        state.values.update({name: force_all(value) for name, value in state.values.items()})
        return BlocksResult(state, state.values.get(made) if made else None, made)

    blocks = blocks_of(pipe)
    assert blocks is not None, "a modular pipeline"
    outputs = {one.name for one in blocks.outputs}
    made = next((name for name in MADE if name in outputs), "")
    own = inspect.signature(original)
    parameters = dict(own.parameters)
    rest = [parameters.pop(n) for n, p in own.parameters.items() if p.kind is p.VAR_KEYWORD]
    for one in blocks.inputs:
        name = one.name or one.kwargs_type
        if name is not None and name not in parameters:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters[name] = inspect.Parameter(name, kind, default=one.default)
    __call__.__dict__["__signature__"] = own.replace(parameters=[*parameters.values(), *rest])
    return __call__


def hide_errors(kinds: tuple[type[BaseException], ...]) -> None:
    """Let blocks log nothing for errors of these kinds, which maskfx raises and handles itself."""
    logging.getLogger(LOGGER).addFilter(HANDLED)
    HANDLED.kinds |= set(kinds)


@contextmanager
def errors_hidden() -> Iterator[None]:
    """Let blocks log no errors within the context: a probe or a recording, which may fail."""
    token = HIDDEN.set(True)
    try:
        yield
    finally:
        HIDDEN.reset(token)


class Handled(logging.Filter):
    """Drops what blocks log about errors that maskfx handles."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[type[BaseException]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        return not (HIDDEN.get() or isinstance(sys.exc_info()[1], tuple(self.kinds)))


HANDLED = Handled()
HIDDEN: ContextVar[bool] = ContextVar("maskfx errors hidden", default=False)


def with_state(arguments: dict[str, object], accepted: Mapping[str, object]) -> dict[str, object]:
    """Return a call's arguments with those that it passes in an earlier call's state."""
    state: object = arguments.get("state")
    if not hasattr(state, "values") or not hasattr(state, "kwargs_mapping"):
        return arguments
    groups = {
        group: {name: state.values.get(name) for name in names}
        for group, names in state.kwargs_mapping.items()
    }
    held = {n: v for n, v in {**groups, **state.values}.items() if n in accepted and v is not None}
    return {**held, **arguments}


@dataclass
class BlocksResult:
    """The state at the end of a call, and the pictures that replace those in it by their name."""

    state: State
    images: object  # None if the blocks make none
    name: str
    template: object = None

    def output(self, names: object) -> Any:
        """Return what a call asks for: the state, the value of a name, or values by name."""
        state, values = self.state, self.state.values
        if self.images is not None:
            values[self.name] = self.images
        if names is None:
            if self.template is not None:
                vars(state)["template"] = self.template
            return state
        if isinstance(names, str):
            return values.get(names)
        if isinstance(names, (list, tuple)):
            return {name: values.get(name) for name in names}
        raise InputError(
            f"output={names!r:.60}: expected the name of a value of the blocks' state, a list of "
            "names, or None for the state itself"
        )


def asked_for(result: object, arguments: Mapping[str, object]) -> object:
    """Return what the call of a pipeline returns: of a modular one, what it names in `output=`."""
    if isinstance(result, BlocksResult):
        return result.output(arguments.get("output"))
    return result


def observed_blocks(
    blocks: Block, prepare: Prepare, bar: Mapping[str, object] | None = None
) -> Block | ObservedLoop:
    """Return the blocks with loops whose initial latents are those that `prepare` returns.

    `bar` holds settings of the loops' progress bars. The blocks themselves are unchanged.
    """
    if is_loop(blocks):
        return ObservedLoop(blocks, prepare, bar)
    parts: Mapping[str, Block] = getattr(blocks, "sub_blocks", {})
    if not parts:
        return blocks
    own: Any = copy.copy(blocks)
    own.sub_blocks = copy.copy(parts)
    for name, part in parts.items():
        own.sub_blocks[name] = observed_blocks(part, prepare, bar)
    made: Block = own
    return made


def loops_of(pipe: object) -> list[Block]:
    """Return the blocks of a modular pipeline that loop over the steps."""
    return [block for block in blocks_within(pipe) if is_loop(block)]


def is_loop(block: object) -> TypeGuard[Block]:
    return callable(getattr(block, "loop_step", None))


class ObservedLoop:
    """A loop over the steps that begins with other latents; all else is the block's."""

    def __init__(
        self, block: Block, prepare: Prepare, bar: Mapping[str, object] | None = None
    ) -> None:
        self._block, self._prepare = copy.copy(block), prepare
        if bar is not None:
            before: Any = attributes_of(block).get("_progress_bar_config", {})
            attributes_of(self._block)["_progress_bar_config"] = {**before, **bar}

    def __call__(self, components: object, state: State) -> tuple[object, State]:
        names = latents_in(state.values)
        if names:
            outputs = tuple(state.values[name] for name in names)
            height, width = (state.values.get(side) for side in ("height", "width"))
            changed = self._prepare(outputs, height, width)
            state.values.update(zip(names, changed, strict=True))
        return self._block(components, state)

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["_block"], name)


def latents_in(values: Mapping[str, object]) -> list[str]:
    """Return the names of the initial latents, and of the noise and pictures that have their form.

    Their order is that of the state, which is the same in each run of the blocks.
    """
    latents = values.get(LATENTS)
    if not isinstance(latents, Tensor) or latents.dim() < 3:
        return []
    alike = [
        name
        for name, value in values.items()
        if isinstance(value, Tensor)
        and value.shape[1:] == latents.shape[1:]
        and value.is_floating_point()
        and name != LATENTS
        and "embeds" not in name
    ]
    return [LATENTS, *alike]


def blocks_within(pipe: object) -> Iterator[Block]:
    """Yield the blocks of a modular pipeline, those inside others included."""
    blocks = blocks_of(pipe)
    ahead = [] if blocks is None else [blocks]
    while ahead:
        block = ahead.pop(0)
        yield block
        ahead += getattr(block, "sub_blocks", {}).values()


def absent_parts(pipe: object) -> Iterator[tuple[str, type[nn.Module]]]:
    """Yield name and class of each module that a modular pipeline hasn't loaded yet."""
    specs: Any = attributes_of(pipe).get("_component_specs", {})
    for name, spec in specs.items():
        kind = getattr(spec, "type_hint", None)
        absent = getattr(pipe, name, None) is None
        if absent and isinstance(kind, type) and issubclass(kind, nn.Module):
            yield name, kind
