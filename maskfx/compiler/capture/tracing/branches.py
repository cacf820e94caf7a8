"""Decisions: branches of Python on a tensor's value (`if positions.max() > limit:`).

torch.export can't trace such a branch. So an eager run records the answers, the export follows
them, and the conditions stay with the capture as a separate graph: a call whose arguments give
other answers needs another capture. Numbers that Python reads and that are lengths of texts
(`lengths.py`) are such conditions, too. Conditions may depend only on arguments that stay the same
in all steps.

This file knows nothing about lanes, passes or the runtime.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from maskfx.compiler.capture.arguments.roles import Argument, observed_sizes
from maskfx.compiler.capture.tracing import lengths as lengths_
from maskfx.compiler.capture.tracing.light_run import LightProducts, light_twin
from maskfx.compiler.capture.tracing.routings import PRESUMED, Routings
from maskfx.errors import CaptureError
from maskfx.ir.modules.lazy_module import LazyModule
from maskfx.ir.modules.lent_methods import lent
from maskfx.ir.nodes import ancestors
from maskfx.ir.objects import Watched, closed_object, copy_tree, open_objects


class Unexportable(CaptureError):
    """No choice of sizes makes the module exportable."""


class BranchesOnSteps(CaptureError):
    """Python branches on values that change from step to step."""


@dataclass
class Decisions:
    """The branch conditions of a capture as a graph, and the answers that the capture followed."""

    questions: fx.GraphModule
    used: list[int]  # inputs whose values the conditions read
    sized: list[int]  # inputs whose sizes the conditions read
    answers: list[bool]
    _asked: list[tuple[object, int]] = field(default_factory=list)
    _shapes: list[object] = field(default_factory=list)
    _held: bool = False

    def hold(self, values: Sequence[object]) -> bool:
        """Return True if these arguments, in graph input order, give the same answers."""
        asked = [(values[i], version_of(values[i])) for i in self.used]
        shapes = [getattr(values[i], "shape", values[i]) for i in self.sized]
        same = len(asked) == len(self._asked) and all(
            a is b and n == m and n >= 0 for (a, n), (b, m) in zip(asked, self._asked, strict=True)
        )
        if not same or shapes != self._shapes:
            with torch.no_grad():
                found = self.questions(*values)
            self._held = [bool(f) for f in found] == self.answers
            self._asked, self._shapes = asked, shapes
        return self._held


def version_of(value: object) -> int:
    """Return how often a value changed in place; -1 if changes leave no trace."""
    if not isinstance(value, Tensor):
        return 0
    return -1 if value.is_inference() else value._version


@dataclass
class PlainRun:
    """What Python asked tensors in an eager run, in order.

    Args:
        answers: the answers of branch conditions.
        counts: the whole numbers of each read, one or a list.
        lengths: the lengths of the texts in this run.
        batch: the number of samples in this run.
        light: whether large products were left out.
    """

    answers: list[bool]
    counts: list[list[int]]
    lengths: list[int]
    batch: int
    light: bool = False

    @property
    def reads_lengths(self) -> bool:
        """Whether a read returned lengths of texts only."""
        return any(lengths_.as_lengths(c, self.lengths, self.lengths) for c in self.counts)

    @property
    def reads_samples(self) -> bool:
        """Whether a read returned a number for each of several samples."""
        return self.batch > 1 and any(len(numbers) == self.batch for numbers in self.counts)


@dataclass
class Followed:
    """The conditions that an export followed, in order, and how many say that numbers are lengths.

    Filled while the module's forward runs.
    """

    answers: list[bool] = field(default_factory=list)
    lengths: int = 0


def plain_run(
    module: torch.nn.Module, inputs: Mapping[str, object], leaves: Sequence[Argument]
) -> PlainRun:
    """Run the module eagerly; reject results that aren't numbers.

    A light run is enough if Python asks nothing in it and nothing is kept of it.
    """
    return light_run(module, inputs, leaves) or full_run(module, inputs, leaves)


def light_run(
    module: torch.nn.Module, inputs: Mapping[str, object], leaves: Sequence[Argument]
) -> PlainRun | None:
    """Run a twin of the module lightly; None if that isn't as good as a full run."""
    try:
        twin = light_twin(module)
        with LightProducts(twin):
            found = full_run(twin.module, copy_tree(inputs), leaves)
    except (torch.OutOfMemoryError, MemoryError, Unexportable):
        raise
    except Exception:  # whatever it is, a full run raises it too, or doesn't
        return None
    found.light = True
    return None if twin.keeps_tensors() or found.answers or found.counts else found


def full_run(
    module: torch.nn.Module, inputs: Mapping[str, object], leaves: Sequence[Argument]
) -> PlainRun:
    batch = observed_sizes(leaves, pytree.tree_leaves(dict(inputs)))["batch"]
    found = PlainRun([], [], lengths_.text_lengths(leaves, inputs), batch)

    def plain(asked: Tensor) -> bool:
        found.answers.append(bool(asked.detach().reshape(()).bool().item()))
        return found.answers[-1]

    def read(asked: Tensor, value_of: lengths_.Read) -> object:
        value = value_of(asked)
        found.counts.append(lengths_.counts_of(value))
        return value

    with torch.no_grad(), asking(plain), lengths_.reading(read):
        watched = Watched(inputs)
        with Routings() if PRESUMED.get() else contextlib.nullcontext():
            result = module(**inputs)
    if name := watched.written():
        raise Unexportable(f"it writes into its argument {name}")
    open_objects(result)
    if made := closed_object(result):
        raise Unexportable(f"it returns an object of its own call ({made})")
    return found


@contextlib.contextmanager
def asking(reply: Callable[[Tensor], object]) -> Iterator[None]:
    """Let `reply` answer when Python converts a tensor to bool, in this thread."""
    before, thread = torch.Tensor.__bool__, threading.get_ident()

    def ask(self: Tensor) -> bool:
        return bool(reply(self) if threading.get_ident() == thread else before(self))

    torch.Tensor.__bool__ = ask  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.__bool__ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def going_by(
    module: torch.nn.Module, plain: PlainRun, leaves: Sequence[Argument]
) -> Iterator[Followed]:
    """Make the module's forward follow a plain run, and also return the conditions it followed."""
    forward = module.forward
    followed = Followed()

    @functools.wraps(forward)
    def answered(*args: object, **kwargs: object) -> tuple[object, tuple[Tensor, ...]]:
        asked: list[Tensor] = []
        answers, counts = iter(plain.answers), iter(plain.counts)
        lengths = lengths_.text_lengths(leaves, kwargs)
        followed.answers, followed.lengths = [], 0

        def reply(question: Tensor) -> bool:
            answer = next(answers, None)
            if answer is None:
                raise CaptureError("under export it branches on more tensors than in a plain run")
            asked.append(question)
            followed.answers.append(answer)
            return answer

        def read(numbers: Tensor, value_of: lengths_.Read) -> object:
            found = lengths_.as_lengths(next(counts, []), plain.lengths, lengths)
            if len(found) != numbers.numel():
                return value_of(numbers)
            asked.append(lengths_.equality(numbers, found))
            followed.answers.append(True)
            followed.lengths += 1
            return found if numbers.dim() else found[0]

        with asking(reply), lengths_.reading(read):
            return forward(*args, **kwargs), tuple(asked)

    with lent(module, answered):
        yield followed


def split_off(module: fx.GraphModule, answers: list[bool], steps: Sequence[bool]) -> Decisions:
    """Move the conditions, which are the graph's last outputs, into a separate graph.

    `steps` marks the inputs that change from step to step: no condition may read their values.
    """
    graph = module.graph
    output = next(n for n in graph.nodes if n.op == "output")
    flat: list[fx.Node] = list(output.args[0])
    kept, asked = flat[: len(flat) - len(answers)], flat[len(flat) - len(answers) :]
    places = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    needed, told = ancestors(asked), ancestors(asked, sizes=False)
    used = sorted(places[n] for n in told if n in places)
    sized = sorted(places[n] for n in needed if n in places)
    if any(steps[i] for i in used):
        raise BranchesOnSteps(
            "Python branches on the values of inputs that change from step to step"
        )
    questions, env = fx.Graph(), {}
    for node in graph.nodes:
        if node in places:
            env[node] = questions.placeholder(str(node.target))
        elif node in needed:
            env[node] = questions.node_copy(node, lambda n: env[n])
    questions.output(tuple(env[n] for n in asked))
    found = Decisions(LazyModule(module, questions), used, sized, answers)
    output.args = (type(output.args[0])(kept),)
    codegen = graph._codegen
    assert isinstance(codegen, _PyTreeCodeGen)
    info = codegen.pytree_info
    assert info.out_spec is not None, "an exported graph has results"
    codegen.pytree_info = info._replace(out_spec=info.out_spec.children()[0])
    graph.eliminate_dead_code()
    module.recompile()
    return found
