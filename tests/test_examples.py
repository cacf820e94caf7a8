"""The scripts of examples/ and the Python code of the tutorial and the how-to pages.

Each script runs as a user runs it, prints one line and writes a picture; the blocks of a page run
one after another, with a tiny pipeline.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

import maskfx
from tests.factories.ip_adapters import save_ip_adapters
from tests.factories.lora import update_of
from tests.factories.lora_files import save_lora
from tests.factories.pipelines import (
    PIPES,
    SD15,
    control_net,
    picture,
    pipe_of,
    spoken,
    square,
)
from tests.serve.launched import served

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
SHOWN = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
PAGES = {
    f"{path.parent.name}/{path.stem}": BLOCK.findall(path.read_text(encoding="utf-8"))
    for folder in ("tutorial", "how-to")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
}
BEFORE = {"how-to/storage": PAGES["how-to/denoisers"][:1]}  # what a page takes from another one
PRINTS = {"tutorial/first-edit": 2}  # how many listings, the first ones, show what the code prints
GIVEN = {"pipe", "photo", "mask", "edges"}  # what the code of a page may use beside its own
GIVEN_TO = {"how-to/adapters": {"denoiser", "updates"}, "how-to/loras": {"portrait"}}

# of the scripts that compile a shipped model: the line that they print, and the picture's size
PRINTED = {
    "first_edit": (r"first edit [\d.]+ s, .*; second edit [\d.]+ s: (\S+)", (768, 256)),
    "many_edits_in_one_batch": (r"4 edits in .* 4 at once at most: (\S+)", (1024, 256)),
    "own_loop": (r"12 steps, 8 .* 1\d% of the sites, 4 all of them: (\S+)", (256, 256)),
    "budget_and_disk": (r"the template takes [345]\d of 60 MB on disk: (\S+)", (256, 256)),
}


def run(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def picture_of(done: subprocess.CompletedProcess[str], line: str, folder: Path) -> Image.Image:
    """The picture that the script's only line names."""
    assert done.returncode == 0, done.stderr
    [printed] = done.stdout.splitlines()
    found = re.fullmatch(line, printed)
    assert found is not None, printed
    return Image.open(folder / found[1])


def test_every_example_is_tested_and_states_what_it_shows():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*PRINTED, "client"}
    for name in names:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert f"examples/{name}.py" in (ast.get_docstring(ast.parse(text)) or "")


@pytest.mark.slow
@pytest.mark.parametrize("script", PRINTED)
def test_an_example_prints_one_line_and_writes_a_picture(script: str, tmp_path: Path):
    line, size = PRINTED[script]
    picture = picture_of(run(script, tmp_path), line, tmp_path)
    assert picture.size == size


def test_the_client_saves_the_picture_of_a_server(tmp_path: Path):
    with served() as server:
        done = run("client", tmp_path, server.url)
    line = r"\d+ steps in [\d.]+ s, 1\d% of the sites computed: (\S+)"
    assert picture_of(done, line, tmp_path).size == (256, 256)


def test_the_client_names_the_address_where_there_is_no_server(tmp_path: Path):
    done = run("client", tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "no server at http://127.0.0.1:9; start one with" in done.stderr


def controlled() -> dict[str, Any]:
    return {**spoken(), "controlnet": control_net(SD15, 0)}


def save_peft_lora(pipe: Any, path: Path) -> None:
    """Write an adapter of this pipeline's UNet as diffusers and peft do."""
    import peft  # type: ignore[import-not-found,unused-ignore]

    pipe.unet.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q"]))
    layers = peft.utils.get_peft_model_state_dict(pipe.unet)
    pipe.save_lora_weights(path.parent, unet_lora_layers=layers, weight_name=path.name)


def names_made(tree: ast.AST) -> set[str]:
    """What a page's code assigns, imports, defines and takes as arguments, in any scope."""
    made = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.ExceptHandler(name=str(name)):
                made.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                made |= {(one.asname or one.name).split(".")[0] for one in names}
    return made


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_the_code_of_a_page_defines_what_it_uses(page: str):
    tree = ast.parse("\n".join([*BEFORE.get(page, []), *PAGES[page]]))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    unknown = used - names_made(tree) - set(dir(builtins))
    assert unknown <= GIVEN | GIVEN_TO.get(page, set())


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_the_code_of_a_page_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    inpaint = PIPES["StableDiffusionInpaintPipeline-spoken"].build
    pipe = inpaint()
    if page == "how-to/controlnets":
        pipe = pipe_of("StableDiffusionControlNetInpaintPipeline", controlled)
    module = ModuleType("page")  # capture looks for the module of a class
    vars(module).update(pipe=pipe, photo=picture(), mask=square(), edges=picture(50))
    blocks = [*BEFORE.get(page, []), *PAGES[page]]
    if page == "how-to/loras" and find_spec("peft") is None:
        blocks = [block for block in blocks if "load_lora_weights" not in block]
    elif page == "how-to/loras":
        save_peft_lora(inpaint(), tmp_path / "style.safetensors")
    if page == "how-to/loras":
        save_ip_adapters(pipe.unet, tmp_path / "adapters", "face")
        vars(module).update(portrait=picture(51))
    if page == "how-to/adapters":
        for seed, name in enumerate(("loras/style", "loras/ink", "elsewhere/oil")):
            path = tmp_path / f"{name}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_lora(path, pipe, seed=seed)
        unet = inpaint().unet
        vars(module).update(denoiser=maskfx.compile(unet), updates=[update_of(unet, 4, 0)])
    monkeypatch.setitem(sys.modules, "page", module)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), vars(module))
    printed = capsys.readouterr().out
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for listing in SHOWN.findall(text)[: PRINTS.get(page, 0)]:
        lines = [line.removesuffix("…").rstrip() for line in listing.splitlines()]
        assert [line for line in lines if line not in printed] == []
