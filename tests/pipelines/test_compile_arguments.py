"""Wrong arguments of compile() and explain(): what was given, what is expected and what to do."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import maskfx
from maskfx.api import ACCEPTED
from maskfx.pipelines.check_settings import check_names
from maskfx.pipelines.compile import compile_pipeline
from maskfx.runtime.planner.costs import Costs
from tests.factories.pipelines import PIPES

NAME = "FluxInpaintPipeline"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"qualty": "fast"},
            r"there is no argument qualty=; did you mean quality=\? It accepts mode, .*",
        ),
        (
            {"zzz": 1},
            r"there is no argument zzz=; It accepts .*remember; correct the name, or leave it out",
        ),
        ({"tiers": 3}, r"tiers=3: expected a maskfx\.Tiers, .* got int; pass one, or leave it out"),
        ({"loader": 3}, r"loader=3: expected a maskfx\.Loader, .* got int; pass one"),
        ({"budget": 10}, r"budget=10: expected a maskfx\.Budget, .* got int; pass one"),
        ({"programs": 3}, r"programs=3: expected the path of a directory, .* got int; pass one"),
        ({"adapters": "folder"}, r"adapters='folder': .*maskfx\.Adapters\(\"loras/\"\), got str"),
        ({"costs": 3}, r"costs=3: expected a dict of Costs by denoiser name, .* got int; pass one"),
        ({"costs": {"unet": 3}}, r"costs\['unet'\]=3: expected Costs, got int; pass what"),
        ({"share": "x"}, r"share='x': expected a whole number, 1 or more, got str; pass one"),
        ({"share": 0}, r"share=0: expected a whole number, 1 or more, got int; pass one"),
        ({"patch_bytes": 1.5}, r"patch_bytes=1\.5: expected a whole number, 0 or more, got float"),
        ({"keep": "all"}, r"keep='all': choose one of both, keys, inputs"),
    ],
)
def test_a_wrong_argument_of_compile(wrong: dict[str, Any], message: str) -> None:
    pipe = PIPES[NAME].build()
    with pytest.raises(maskfx.InputError, match=rf"^compile\({NAME}\): {message}"):
        maskfx.compile(pipe, **wrong)
    assert not any("maskfx" in name for name in vars(pipe))


@pytest.mark.parametrize(
    "given", [{"keep": "keys"}, {"costs": {"transformer": Costs((), (), 0.0, 0.0, 0.0)}}]
)
def test_what_plans_alone_use_is_refused_without_them(given: dict[str, Any]) -> None:
    pipe = PIPES[NAME].build()
    [name] = given
    with pytest.raises(maskfx.InputError, match=f"^{name}= has no effect with plans=False; leave"):
        maskfx.compile(pipe, plans=False, **given)
    assert not any("maskfx" in name for name in vars(pipe))
    maskfx.compile(pipe, **given)


def test_an_unknown_argument_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match="did you mean stretches="):
        check_names("compile()", ["streches"], ACCEPTED)


@pytest.mark.parametrize("wrong", [3, None, "pipe"])
def test_explain_of_something_else(wrong: object) -> None:
    with pytest.raises(maskfx.InputError, match=r"explain\(\): .*, got \w+; pass what maskfx\.com"):
        maskfx.explain(wrong)


def test_defaults_are_accepted(tmp_path: Path) -> None:
    pipe = PIPES[NAME].build()
    tiers = maskfx.Tiers(host_bytes=1 << 20)
    maskfx.compile(pipe, tiers=tiers, budget=None, costs=None, adapters=None, programs=tmp_path)


def test_the_arguments_of_pipelines_are_those_of_compile_pipeline() -> None:
    """`maskfx.compile` itself has `pipe`, `settings` and `loader`."""
    own = set(inspect.signature(compile_pipeline).parameters) - {"pipe", "settings", "loader"}
    every = set(inspect.signature(maskfx.compile).parameters) - {"module", "of_pipeline"}
    assert set(ACCEPTED) == every | own
