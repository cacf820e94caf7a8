"""The JSON documents of an artifact: their fields, for what writes and what reads them."""

from __future__ import annotations

from typing import TypedDict

from maskfx.compiler.capture.arguments.roles import Sizes
from maskfx.ir.json_values import Json


class NodeDocument(TypedDict):
    """A node of a graph.

    Args:
        op, name, target: of the node; a function by its name.
        args, kwargs: as `encoded` writes them.
        val: shape and dtype of its value at capture, or the number.
        origin: the node of the captured graph that it comes from.
    """

    op: str
    name: str
    target: str
    args: Json
    kwargs: Json
    val: Json
    origin: str


class WholeDocument(TypedDict):
    """The fields of a `Whole`; `path` is that of its module in the denoiser."""

    path: str
    spec: SpecDocument
    constants: Json
    axes: int
    widths: list[int]
    width: int
    flops: int


class AttributeDocument(TypedDict, total=False):
    """What a node reads of its module: one of these.

    Args:
        made: whether the reader makes it again.
        graph: a graph inside the graph.
        whole: a module of the denoiser that stays whole.
        weight: the path of a weight.
        constant: the number of a constant.
    """

    made: bool
    graph: GraphDocument
    whole: WholeDocument
    weight: str
    constant: str


class GraphDocument(TypedDict):
    """A graph: its nodes in order, and its attributes by their path."""

    nodes: list[NodeDocument]
    attributes: dict[str, AttributeDocument]


class SpecDocument(TypedDict):
    """The structure of arguments or results, and the modules that know its classes."""

    spec: str
    modules: list[str]


class DecisionsDocument(TypedDict):
    """The fields of `Decisions`."""

    questions: GraphDocument
    used: list[int]
    sized: list[int]
    answers: list[bool]


class SideDocument(TypedDict):
    """The fields of a `SideGraph`."""

    graph: GraphDocument
    lanes: Json
    used: list[int]
    nodes: int


class ProgramDocument(TypedDict):
    """The fields of a `Program`; `taps` are names of nodes."""

    graph: GraphDocument
    taps: list[str]
    interface: Json
    code: str
    origins: dict[str, AttributeDocument]


class CaptureDocument(TypedDict):
    """The fields of a `Capture`; its graph is apart."""

    has_graph: bool
    leaves: Json
    in_spec: SpecDocument
    out_spec: SpecDocument
    pyramid: Json
    constants: Json
    fixed: dict[str, int]
    frozen: Sizes | None
    fixed_batch: int | None
    single: bool
    autocast: list[str]
    features: Json
    results: Json
    notes: list[str]
    decisions: DecisionsDocument | None


class CompilationDocument(TypedDict):
    """The fields of a `Compilation`; a record is the list of its fields."""

    capture: CaptureDocument
    program: ProgramDocument | None
    request: SideDocument | None
    dense: SideDocument | None
    reasons: dict[str, str]
    records: list[tuple[str, int, float, int]]
    seconds: float
