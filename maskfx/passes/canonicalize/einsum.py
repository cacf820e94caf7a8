"""Rewrites an einsum of one or two operands to permutes, sums and one product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from maskfx.passes.context import PassContext, aten, node_value, op_name
from maskfx.passes.spelling import Speller


def canonicalize_einsum(graph: fx.Graph, ctx: PassContext) -> int:
    """Rewrite an einsum to permutes, sums, and a matmul or an elementwise product.

    Before  y = einsum("nhwpqc->nchpwq", [x])
    After   y = permute(x, [0, 5, 1, 3, 2, 4])
    and     y = einsum("bihd,bjhd->bhij", [q, k])
    becomes y = matmul(permute(q, [0, 2, 1, 3]), permute(k, [0, 2, 3, 1]))
    and     y = einsum("bnd,bde,bn->bne", [q, k, z])
    becomes y = mul(matmul(q, k), unsqueeze(z, -1))     (the first two operands first)
    Keeps   an einsum that repeats a letter, one without an arrow.
    """
    count = 0
    for node in list(graph.nodes):
        terms = read(node) if op_name(node) == "einsum" else None
        if terms is None:
            continue
        spell, operands = Speller(graph, node), list(node.args[1])
        *inputs, out = terms
        while len(operands) > 2:  # the first two by themselves
            kept = "".join(dict.fromkeys(x for term in (*inputs[2:], out) for x in term))
            kept = "".join(x for x in kept if x in inputs[0] + inputs[1])
            value, letters = product(spell, operands[:2], inputs[:2], kept)
            operands, inputs = [value, *operands[2:]], [letters, *inputs[2:]]
        if len(operands) == 1:
            value, letters = summed(spell, operands[0], inputs[0], out)
        else:
            extra = alone(inputs, operands, out)
            value, letters = product(spell, operands, inputs, extra + out)
            if extra:
                value = spell.permute(value, [letters.index(x) for x in extra + out])
                value = spell.emit(aten.squeeze.dims, value, list(range(len(extra))))
                letters = out
        spell.replace(spell.permute(value, [letters.index(letter) for letter in out]))
        count += 1
    return count


def read(node: fx.Node) -> list[str] | None:
    """Return the letters of each operand and of the result, or None if they aren't simple."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)):
        return None
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = [*left.split(","), out]
    values = [node_value(n) for n in operands if isinstance(n, fx.Node)]
    if not arrow or not operands or len(terms) != len(operands) + 1:
        return None
    if len(values) != len(operands) or not all(isinstance(v, torch.Tensor) for v in values):
        return None
    terms = spelled_out(terms, [v.dim() for v in values])
    letters = set("".join(terms[:-1]))
    simple = all(len(set(term)) == len(term) for term in terms) and letters >= set(terms[-1])
    return (
        terms
        if simple and all(len(t) == v.dim() for t, v in zip(terms, values, strict=False))
        else None
    )


def spelled_out(terms: list[str], ranks: list[int]) -> list[str]:
    """Replace each "..." by letters, the last ones the same in all terms."""
    spare = "".join(chr(code) for code in range(0x3B1, 0x3C9))
    counts = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=False)]
    most = max((n for t, n in zip(terms, counts, strict=False) if "..." in t), default=0)
    counts.append(most)
    pairs = zip(terms, counts, strict=True)
    return [t.replace("...", spare[most - n : most] if n > 0 else "") for t, n in pairs]


def alone(terms: list[str], operands: list[fx.Node], out: str) -> str:
    """Return the letters of axes of size one that only one operand has, and the result lacks."""
    found = ""
    for (term, other), value in zip((terms, terms[::-1]), operands, strict=True):
        shape = node_value(value).shape
        found += "".join(
            x for x, n in zip(term, shape, strict=True) if x not in other + out and n == 1
        )
    return found


def summed(spell: Speller, value: fx.Node, letters: str, kept: str) -> tuple[fx.Node, str]:
    """Sum over the axes that nothing else has."""
    gone = [i for i, letter in enumerate(letters) if letter not in kept]
    if gone:
        value = spell.emit(aten.sum.dim_IntList, value, gone)
    return value, "".join(letter for letter in letters if letter in kept)


def product(
    spell: Speller, operands: list[fx.Node], terms: list[str], out: str
) -> tuple[fx.Node, str]:
    """Multiply two operands; return the result and its letters."""
    a, la = summed(spell, operands[0], terms[0], terms[1] + out)
    b, lb = summed(spell, operands[1], terms[1], terms[0] + out)
    inner = [x for x in la if x in lb and x not in out]
    if not inner:
        a, b = (lined_up(spell, v, letters, out) for v, letters in ((a, la), (b, lb)))
        return spell.emit(aten.mul.Tensor, a, b), out
    both = [x for x in out if x in la and x in lb]
    if len(la) < len(lb) and not both:  # a weight comes second
        (a, la), (b, lb) = (b, lb), (a, la)
    rows, columns = ([x for x in out if x in t and x not in both] for t in (la, lb))
    outer = [*both, *rows[:-1], *columns[:-1]]
    row, column = rows[-1:], columns[-1:]
    plain = not both and not columns[:-1]  # a matrix for all: no axes to line up
    a = lined_up(spell, a, la, [*outer, *row, *inner])
    b = lined_up(spell, b, lb, [*([] if plain else outer), *inner, *column])
    if len(inner) > 1:
        start = len(outer) + len(row)
        a = spell.emit(aten.flatten.using_ints, a, start, start + len(inner) - 1)
        start = 0 if plain else len(outer)
        b = spell.emit(aten.flatten.using_ints, b, start, start + len(inner) - 1)
    if not row:
        a = spell.emit(aten.unsqueeze.default, a, -2)
    if not column:
        b = spell.emit(aten.unsqueeze.default, b, -1)
    found = spell.emit(aten.matmul.default, a, b)
    if not column:
        found = spell.emit(aten.squeeze.dims, found, [-1])
    if not row:
        found = spell.emit(aten.squeeze.dims, found, [-1 if not column else -2])
    return found, "".join([*outer, *row, *column])


def lined_up(spell: Speller, value: fx.Node, letters: str, wanted: Iterable[str]) -> fx.Node:
    """Permute axes into this order, with an axis of size one for each that the value lacks."""
    have = [letter for letter in wanted if letter in letters]
    value = spell.permute(value, [letters.index(letter) for letter in have])
    for axis, letter in enumerate(wanted):
        if letter not in letters:
            value = spell.emit(aten.unsqueeze.default, value, axis)
    return value
