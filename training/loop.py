"""A training run: steps, an average of the weights, a log, and a checkpoint that it resumes from.

Knows nothing of what is trained: that is a `Task`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.muon import Muon

Numbers = dict[str, float]


class Task(Protocol):
    """What is trained. All chance comes from the step's number, so that a resumed run goes on."""

    name: str
    module: nn.Module
    rate: float
    average: float
    # weights that Muon moves, at its own rate, and not Adam
    matrices: Sequence[Tensor] = ()
    matrix_rate: float = 0.0

    def loss(self, step: int) -> tuple[Tensor, Numbers]:
        """The loss of one step, and what the log should say of it."""

    def judge(self, averaged: nn.Module) -> Numbers:
        """Figures on held-out scenes, of the averaged weights."""


class Average:
    """An exponential moving average of a module's weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {key: value.detach().clone() for key, value in weights_of(module).items()}

    def take(self, module: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        current = weights_of(module)
        torch._foreach_lerp_(
            list(self.weights.values()), [current[key] for key in self.weights], 1 - decay
        )


class Run:
    """One task in one folder: `checkpoint.pt` and `log.jsonl`."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task = task
        self.folder = folder
        self.step = 0
        self.begun = 0  # the step since which the optimizer has gathered what it knows
        self.seconds = 0.0
        self.average = Average(task.module, task.average)
        self.optimizers = optimizers_of(task)
        self.stopped = False
        folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self.load()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def train(
        self,
        seconds: float,
        steps: int | None = None,
        goal: Numbers | None = None,
        save_every: float = 300.0,
        cool: float = 0.0,
    ) -> None:
        """Go on for a number of seconds, until all judged figures reach a goal or a signal comes.

        In the last `cool` seconds the rate falls to nothing. The end is saved in any case.
        """
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self.stop)
        end = self.seconds + seconds
        saved = last = time.monotonic()
        sums: dict[str, list[float]] = {}
        while not self.stopped and self.seconds < end and (steps is None or self.step < steps):
            heat = min(1.0, (end - self.seconds) / cool) if cool else 1.0
            for key, value in self.one_step(heat).items():
                sums.setdefault(key, []).append(value)
            now = time.monotonic()
            # what a paused process slept isn't training time
            self.seconds += min(now - last, 60.0)
            last = now
            if self.step % 100 == 0:
                means = {key: sum(values) / len(values) for key, values in sums.items()}
                self.log(means)
                sums = {}
            if now - saved > save_every:
                judged = self.save()
                saved = time.monotonic()
                if goal and all(judged[key] >= least for key, least in goal.items()):
                    return
        self.save()

    def one_step(self, heat: float = 1.0) -> Numbers:
        task = self.task
        heat *= min(1.0, (self.step - self.begun + 1) / 300)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * heat
            optimizer.zero_grad(set_to_none=True)
        loss, numbers = task.loss(self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(task.module.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            for optimizer in self.optimizers:
                optimizer.step()
        self.average.take(task.module, self.step)
        self.step += 1
        return {"loss": loss.item(), "norm": norm.item(), **numbers}

    def stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def log(self, numbers: Numbers) -> None:
        line = {"step": self.step, "seconds": round(self.seconds, 1)}
        line |= {key: round(value, 6) for key, value in numbers.items()}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> Numbers:
        """Judge, then write. The weights are kept as they are, the rest in 16 bits."""
        module = self.task.module
        kept = {key: value.detach().clone() for key, value in weights_of(module).items()}
        put_weights(module, self.average.weights)
        module.eval()
        with torch.no_grad():
            judged = self.task.judge(module)
        self.log(judged)
        module.train()
        put_weights(module, kept)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "weights": kept,
            "average": {key: value.half() for key, value in self.average.weights.items()},
            "begun": self.begun,
            "optimizers": [halved(one.state_dict()) for one in self.optimizers],
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self.checkpoint)
        return judged

    def load(self) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.step, self.seconds = state["step"], state["seconds"]
        put_weights(self.task.module, state["weights"])
        for key, value in self.average.weights.items():
            value.copy_(state["average"][key])
        if "optimizers" not in state:  # weights alone, as a package ships them
            self.begun = self.step
            return
        self.begun = state["begun"]
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(widened(kept))


def optimizers_of(task: Task) -> list[torch.optim.Optimizer]:
    """Adam, and Muon for a task's matrices; each group keeps the rate it is meant to have."""
    apart = {id(matrix) for matrix in task.matrices}
    rest = [one for one in task.module.parameters() if id(one) not in apart]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=task.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    ]
    if task.matrices:
        made.append(Muon(task.matrices, task.matrix_rate))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.data for key, value in module.named_parameters()}


def put_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    for key, value in weights_of(module).items():
        value.copy_(weights[key])


def averaged_weights(checkpoint: Path) -> dict[str, Tensor]:
    """What a finished or interrupted run would ship."""
    if not checkpoint.exists():
        raise FileNotFoundError(
            f"{checkpoint}: no such checkpoint; train first: python -m training.train"
        )
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    return {key: value.float() for key, value in state["average"].items()}


def halved(value: Any) -> Any:
    """Tensors of several numbers in bfloat16."""
    return mapped(value, lambda one: one.bfloat16() if one.numel() > 1 else one)


def widened(value: Any) -> Any:
    return mapped(value, lambda one: one.float())


def mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: mapped(one, change) for key, one in value.items()}
    if isinstance(value, list):
        return [mapped(one, change) for one in value]
    return value
