"""Runs the dense members of a batch step: by the module, or in rows where that measures faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from math import inf

import torch

from maskfx.pipelines.runs.computed_sites import sites_of
from maskfx.pipelines.runs.step_members import CallMember
from maskfx.pipelines.templates.batches import picture_of
from maskfx.runtime.denoiser import CompiledDenoiser
from maskfx.runtime.dense_ways import DenseBatch, DenseWay
from maskfx.runtime.steps import DenseStep

log = logging.getLogger(__name__)


def run_by_module(denoiser: CompiledDenoiser, members: Sequence[CallMember]) -> list[CallMember]:
    """Run the dense members that the module itself should run; return the remaining members.

    On a CPU it runs all of them, because dense row sets take longer than its calls, except those of
    several runs and sizes: where `are_measured` is True, they run the way that measures faster.
    Elsewhere it runs those that can share a call of it, or have no other member to share a step
    with. A run alone gets results bit-identical to the module's. With Inductor all members remain,
    because its code may be faster than the module.
    """
    dense = [member for member in members if isinstance(member.step, DenseStep)]
    if not dense or denoiser.settings.inductor:
        return list(members)
    left = [member for member in members if not isinstance(member.step, DenseStep)]
    if are_measured(denoiser, dense):
        return left + run_measured(denoiser, dense)
    if len({id(member.call.run) for member in members}) == 1:
        alone, rows_are_better = dense, bool(left) and not on_cpu(denoiser)
    else:
        alone, rows_are_better = run_shared(denoiser, dense), not on_cpu(denoiser)
    if rows_are_better:
        return left + alone
    for member in alone:
        run_module(denoiser, member)
    return left


def are_measured(denoiser: CompiledDenoiser, dense: Sequence[CallMember]) -> bool:
    """Return True if dense members run the way that measures faster.

    Where templates are kept these are members of several runs and sizes, on a CPU, as soon as the
    denoiser has a program: a recording or an edit made it, and no request waits for a capture.
    """
    if denoiser.settings.mode == "patch_batch":
        return len(dense) > 1
    if denoiser.settings.mode != "mask_cache" or not denoiser.programs or not on_cpu(denoiser):
        return False
    return len({id(member.call.run) for member in dense}) > 1 and count_sizes(dense) > 1


def count_sizes(dense: Sequence[CallMember]) -> int:
    """Return the number of distinct picture sizes of dense members."""
    shapes = [picture_of(member.step.inputs) for member in dense]
    return len({None if one is None else tuple(one.shape[1:]) for one in shapes})


def run_measured(denoiser: CompiledDenoiser, dense: Sequence[CallMember]) -> list[CallMember]:
    """Run dense members in rows or by the module, whichever measured faster; return those left.

    Members whose step in rows failed are left.
    """
    sites = sum(sites_of(member.step, lambda mask: mask.numel())[1] for member in dense)
    batch = DenseBatch.of(len(dense), count_sizes(dense), sites)
    way = denoiser.dense_ways.choose(batch)
    began = time.perf_counter()
    if way is DenseWay.ROWS:
        try:
            results = denoiser.step([member.step for member in dense])
        except Exception as error:
            log.debug("%d dense requests fail in rows: %s", len(dense), error)
            denoiser.dense_ways.add(batch, way, inf, sites)
            return list(dense)  # its halves are tried
        for member, result in zip(dense, results, strict=True):
            member.result = result
    else:
        for member in run_shared(denoiser, dense):
            run_module(denoiser, member)
    synchronize(denoiser)
    took = time.perf_counter() - began
    denoiser.dense_ways.add(batch, way, took, sites)
    return []


def synchronize(denoiser: CompiledDenoiser) -> None:
    """Wait until a GPU has computed what was queued, so that its time can be measured."""
    weights = next(denoiser.module.parameters(), None)
    if weights is not None and weights.device.type == "cuda":
        torch.cuda.synchronize(weights.device)


def run_shared(denoiser: CompiledDenoiser, dense: Sequence[CallMember]) -> list[CallMember]:
    """Run dense members that can share a call of the module; return the others and those failed."""
    try:
        steps = [member.step for member in dense]
        groups = denoiser.alike([s.inputs for s in steps], [s.adapters for s in steps])
    except Exception as error:  # trying whether they can share a call needs memory too
        log.debug("whether %d requests can share a call isn't known: %s", len(dense), error)
        return list(dense)
    alone = []
    for group in groups:
        own = [dense[number] for number in group.numbers]
        if len(own) == 1:
            alone += own
            continue
        try:
            results = denoiser.plain_together(group)
        except Exception as error:  # each is run alone, for its result or its error
            log.debug("a call of %d requests fails: %s", len(own), error)
            alone += own
            continue
        for member, result in zip(own, results, strict=True):
            member.result = result
    return alone


def run_module(denoiser: CompiledDenoiser, member: CallMember) -> None:
    try:
        member.result = denoiser.plain_step(member.step)
    except Exception as error:
        member.error = error


def on_cpu(denoiser: CompiledDenoiser) -> bool:
    weights = next(denoiser.module.parameters(), None)
    return weights is not None and weights.device.type == "cpu"
