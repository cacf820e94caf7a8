"""The command line: what reaches the settings, edits here and by a server, a quick start."""

from __future__ import annotations

import base64
import io
import json
import re
import resource
import subprocess
import sys
import threading
import tomllib
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import maskfx
from maskfx.cli import main as cli
from maskfx.cli.remote import events
from maskfx.serve.models.pipeline_model import PipelineModel
from tests.factories import served

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "diffusers", "transformers", "sklearn", "scipy", "fastapi", "uvicorn"}
LEAST = "import typer.rich_utils, pydantic"  # what a command can't do without
MOST = 2.5  # computing of a command that needs no torch, in times of that


# Starting.


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--print-config"], ["edit", "--help"]])
def test_what_needs_no_torch_starts_without_it(arguments: list[str]) -> None:
    code = (
        "import sys; from maskfx.cli.main import main; status = main(sys.argv[1:]); "
        f"heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy; raise SystemExit(status)"
    )
    # in turn, so that another load of the machine is in both; the first may write bytecode
    spent = [(processor_time(code, *arguments), processor_time(LEAST)) for _ in range(4)]
    command, least = (min(times) for times in zip(*spent, strict=True))
    assert command < MOST * least


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"maskfx {maskfx.__version__}\n"


def processor_time(code: str, *arguments: str) -> float:
    """Seconds of computing that a Python process with this code takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("line", "package", "importer", "extra"),
    [
        ("edit IMAGE --prompt p --out OUT --server http://s", "httpx", "cli.remote", "serve"),
        ("serve", "structlog", "serve.launch", "serve"),
        ("bench", "diffusers", "serve.models.model_source", "diffusers"),
    ],
)
def test_an_absent_extra_is_named(
    line: str,
    package: str,
    importer: str,
    extra: str,
    files: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, f"maskfx.{importer}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    line = line.replace("IMAGE", str(files / "alpha.png")).replace("OUT", str(files / "out.png"))
    assert cli.main(line.split()) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"the package {package}, which isn't installed" in said
    assert f"pip install 'maskfx[{extra}]'" in said


def test_an_absent_package_of_no_extra_is_a_bug(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "maskfx.cli.remote", raising=False)
    monkeypatch.setitem(sys.modules, "base64", None)
    with pytest.raises(ModuleNotFoundError, match="base64"):
        cli.main(edit_of(files, "alpha.png", "--server", "http://s"))


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = {"pyzmq": "zmq"}
    for extra, packages in cli.EXTRAS.items():
        wanted = [
            re.split("[>=]", one)[0]
            for one in project["optional-dependencies"][extra]
            if not one.startswith("maskfx[")
        ]
        assert sorted(packages) == sorted(
            imported.get(one, one).replace("-", "_") for one in wanted
        )


# Serving.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that a server would be started with."""
    found: list[Any] = []
    module = types.ModuleType("maskfx.serve.launch")

    def serve(settings: Any) -> int:
        found.append(settings)
        return 3

    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "maskfx.serve.launch", module)
    return found


def test_options_reach_the_settings_and_the_status_comes_back(launched: list[Any]) -> None:
    line = "serve some/model --host 0.0.0.0 --port 0 --api-key k --served-model-name m"
    line += " --max-num-seqs 3 --shutdown-timeout 7 --workers 2 --set limits.images=1 --set queue=5"
    assert cli.main(line.split()) == 3
    (settings,) = launched
    assert (settings.model, settings.host, settings.port) == ("some/model", "0.0.0.0", 0)
    assert settings.api_key.get_secret_value() == "k"
    assert (settings.served_model_name, settings.max_num_seqs) == ("m", 3)
    assert (settings.shutdown_timeout, settings.workers) == (7.0, 2)
    assert (settings.limits.images, settings.queue) == (1, 5)


def test_the_command_line_wins_over_variables_and_file(
    launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.toml"
    file.write_text("port = 1\nworkers = 2\nqueue = 3\n")
    monkeypatch.setenv("MASKFX_PORT", "11")
    monkeypatch.setenv("MASKFX_WORKERS", "12")
    cli.main(["serve", "--port", "21", "--config", str(file)])
    assert [launched[0].port, launched[0].workers, launched[0].queue] == [21, 12, 3]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["serve", "--set", "limits.image=1"], "did you mean limits.images"),
        (["serve", "--set", "queue"], "KEY=VALUE"),
        (["serve", "--api-key", ""], "api_key"),
        (["serve", "--workers", "0"], "workers"),
        (["fly"], "fly"),
    ],
)
def test_what_cant_be_served_ends_with_2(
    arguments: list[str], seen: str, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert seen in capsys.readouterr().err
    assert not launched


def test_printed_settings_hide_the_key(
    launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--api-key", "hunter2", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert '# api_key = "********"  # command line' in out
    assert not launched


# Editing.


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A picture and masks of it."""
    Image.fromarray(served.picture()).save(tmp_path / "image.png")
    mask = served.square()
    Image.fromarray(mask.astype(np.uint8) * 255).save(tmp_path / "white.png")
    alpha = np.dstack([served.picture(), np.where(mask, 0, 255).astype(np.uint8)])
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    Image.fromarray(np.zeros((32, 32), np.uint8)).save(tmp_path / "black.png")
    Image.fromarray(np.full((8, 8), 255, np.uint8)).save(tmp_path / "small.png")
    (tmp_path / "text.png").write_text("no picture")
    return tmp_path


def edit_of(files: Path, image: str, *more: str) -> list[str]:
    return ["edit", str(files / image), "--prompt", "a cat", "--out", str(files / "out.png"), *more]


@pytest.mark.parametrize(
    ("image", "more", "seen"),
    [
        ("image.png", [], "no alpha"),
        ("image.png", ["--mask", "white.png"], "no alpha"),
        ("image.png", ["--mask-mode", "luminance"], "give --mask"),
        ("image.png", ["--mask", "black.png", "--mask-mode", "luminance"], "nothing is masked"),
        ("image.png", ["--mask", "small.png", "--mask-mode", "luminance"], "8x8"),
        ("image.png", ["--mask", "white.png", "--mask-mode", "white"], "choose one of"),
        ("text.png", [], "no known image format; give a PNG"),
        ("missing.png", [], "can't be read"),
        ("alpha.png", ["--api-key", "k"], "--server"),
        ("alpha.png", ["--server", "http://127.0.0.1:1", "--model", "m"], "leave --model"),
        ("alpha.png", ["--server", "127.0.0.1"], "http://"),
        ("alpha.png", ["--steps", "-1"], "--steps -1: input should be greater than or equal to 1"),
        ("alpha.png", ["--strength", "7"], "--strength 7.0: input should be less than or equal"),
        ("alpha.png", ["--guidance", "nan"], "--guidance nan: input should be less than"),
    ],
)
def test_edits_that_make_no_sense_are_refused(
    files: Path, image: str, more: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(files / each) if each.endswith(".png") else each for each in more]
    assert cli.main(edit_of(files, image, *given)) == 2
    assert seen in capsys.readouterr().err
    assert not (files / "out.png").exists()


@pytest.mark.parametrize(
    ("out", "seen"),
    [("missing/out.png", "No such file"), ("out.docx", "give .png"), ("folder.png", "directory")],
)
def test_a_result_that_cant_be_written_is_refused_before_the_edit(
    files: Path, server: str, out: str, seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "folder.png").mkdir()
    before = sorted(files.iterdir())
    line = ["edit", str(files / "alpha.png"), "--prompt", "a cat", "--out", str(files / out)]
    assert cli.main([*line, "--server", server]) == 2
    said = capsys.readouterr().err
    assert "--out" in said
    assert seen in said
    assert not Server.came
    assert sorted(files.iterdir()) == before


def test_a_local_edit_ends_its_model_whatever_happens(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Failing:
        def __init__(self, *_: Any) -> None: ...

        def ready(self) -> Any:
            return types.SimpleNamespace(takes=["seed"])

        def start(self, *_: Any) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr("maskfx.serve.models.pipeline_model.PipelineModel", Failing)
    assert cli.main(edit_of(files, "alpha.png")) == 130
    assert len(closed) == 1
    assert not (files / "out.png").exists()


class Server(BaseHTTPRequestHandler):
    """Answers an edit as the contract states; keeps what came."""

    came: list[tuple[dict[str, str], dict[str, bytes], str | None]] = []
    refuses = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fields, files = parted(body, self.headers["Content-Type"])
        self.came.append((fields, files, self.headers["Authorization"]))
        if self.path != "/v1/images/edits" or self.refuses:
            self.answer(400, json.dumps({"error": {"code": "mask_empty", "message": "No."}}))
            return
        stream = io.BytesIO()
        Image.new("RGB", (32, 32), (1, 2, 3)).save(stream, "PNG")
        content = base64.b64encode(stream.getvalue()).decode()
        text = ""
        for kind in ("partial_image", "partial_image", "completed"):
            event = {"type": f"image_edit.{kind}", "b64_json": content}
            text += f"event: image_edit.{kind}\ndata: {json.dumps(event)}\n\n"
        self.answer(200, text)

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        return


def parted(body: bytes, kind: str) -> tuple[dict[str, str], dict[str, bytes]]:
    """A form by the parser that the server has."""
    from python_multipart import parse_form

    fields: dict[str, str] = {}
    files: dict[str, bytes] = {}

    def on_field(field: Any) -> None:
        fields[field.field_name.decode()] = field.value.decode()

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        files[file.field_name.decode()] = file.file_object.read()

    headers = {"Content-Type": kind.encode(), "Content-Length": str(len(body)).encode()}
    parse_form(headers, io.BytesIO(body), on_field, on_file)
    return fields, files


@pytest.fixture
def server() -> Iterator[str]:
    Server.came, Server.refuses = [], False
    made = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_an_edit_by_a_server_sends_the_picture_with_a_transparent_mask(
    files: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKFX_API_KEY", "from-the-environment")
    more = ["--mask", str(files / "white.png"), "--mask-mode", "luminance", "--seed", "7"]
    assert cli.main(edit_of(files, "image.png", *more, "--server", server, "--steps", "4")) == 0
    ((fields, sent, key),) = Server.came
    assert key == "Bearer from-the-environment"
    assert fields["prompt"] == "a cat"
    assert (fields["seed"], fields["num_inference_steps"], fields["stream"]) == ("7", "4", "true")
    assert "guidance_scale" not in fields
    picture = np.asarray(Image.open(io.BytesIO(sent["image"])))
    assert np.array_equal(picture, served.picture())
    mask = Image.open(io.BytesIO(sent["mask"]))
    assert np.array_equal(np.asarray(mask.convert("RGBA"))[..., 3] == 0, served.square())
    assert not np.asarray(mask.convert("RGB")).any()  # the picture isn't sent twice
    assert (np.asarray(Image.open(files / "out.png")) == (1, 2, 3)).all()


def test_a_server_that_says_no_is_quoted(
    files: Path, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Server.refuses = True
    assert cli.main(edit_of(files, "alpha.png", "--server", server)) == 1
    assert "mask_empty: No." in capsys.readouterr().err
    assert not (files / "out.png").exists()


def test_a_server_that_isnt_there(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(edit_of(files, "alpha.png", "--server", "http://127.0.0.1:9")) == 1
    assert "refused" in capsys.readouterr().err


def test_events_of_a_stream() -> None:
    lines = ["event: a", 'data: {"x":', "data: 1}", "", ": alive", ""]
    lines += ['data: {"x": 2}', "", "data: [DONE]", ""]
    assert list(events(lines)) == [{"x": 1}, {"x": 2}]


# With a model.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("model")
    served.build("StableDiffusion3InpaintPipeline").save_pretrained(where)
    return str(where)


def test_the_quality_of_an_edit_here_is_a_setting(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def edit_here(*given: object) -> int:
        seen.append(given)
        return 0

    monkeypatch.setattr("maskfx.cli.edit.edit_here", edit_here)
    for name in ("fast", "balanced", "faithful"):
        assert cli.main(edit_of(files, "alpha.png", "--quality", name, "--steps", "3")) == 0
        call, _, effective = seen.pop()
        assert (effective.settings.quality, call.parameters["steps"]) == (name, 3)
    assert cli.main(edit_of(files, "alpha.png", "--quality", "best")) == 2
    assert "'fast', 'balanced'" in capsys.readouterr().err


@pytest.mark.slow
def test_an_edit_here(
    files: Path, folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--model", folder, "--steps", "3", "--seed", "5"]
    assert cli.main(edit_of(files, "alpha.png", *more)) == 0
    made, mask = np.asarray(Image.open(files / "out.png")), served.square()
    assert np.array_equal(made[~mask], served.picture()[~mask])
    assert not np.array_equal(made[mask], served.picture()[mask])
    (line,) = capsys.readouterr().out.splitlines()
    assert "seed 5" in line
    takes = PipelineModel._takes
    monkeypatch.setattr(PipelineModel, "_takes", lambda model: takes(model) - {"seed"})
    assert cli.main(edit_of(files, "alpha.png", *more)) == 2
    assert "this model accepts no seed; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("train-judge --tolerance inf --out FOLDER/j.npz", "--tolerance inf: give a relative"),
        ("train-judge --steps 0 --out FOLDER/j.npz", "--steps 0: give 1 or more"),
        ("train-judge --out /proc/j.npz", "--out /proc/j.npz: can't be written"),
        ("train-judge --out FILE/j.npz", "j.npz: can't be written: "),
        ("train-judge --out FOLDER/j.npz --device moon", "device 'moon': PyTorch can't compute"),
        ("fit-forecast --every 1 --out FOLDER/f.json", "--every 1: give 2 or more"),
        ("fit-forecast --strength 2 --out FOLDER/f.json", "--strength 2.0: give a number above 0"),
        ("fit-forecast --out FOLDER/f.npz", "f.npz: expected a file name with .json"),
        ("fit-forecast --picture FILE --out FOLDER/f.json", "it is for edits; give --edits too"),
        ("fit-forecast --edits --picture FILE --out FOLDER/f.json", "no known image format"),
        ("fit-forecast --out /proc/f.json", "--out /proc/f.json: can't be written"),
        ("bench --set device=meta", "device 'meta': PyTorch can't compute"),
        ("adapters profile unet FILE", "not a whole safetensors file"),
        ("adapters profile unet FILE --steps 0", "--steps 0: give 1 or more"),
        ("adapters profile unet FILE --weight nan", "--weight nan: give a finite number"),
        ("cache gc FOLDER --ttl nan", "--ttl nan: give 0 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_a_model_is_loaded(
    line: str,
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "diffusers.DiffusionPipeline.from_pretrained", lambda *_: pytest.fail("loaded")
    )
    file = tmp_path / "lora.safetensors"
    file.write_text("garbage")
    words = line.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)).split()
    assert cli.main(words) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert seen in told


@pytest.mark.slow
def test_explain_and_bench(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", folder, "--mask-ratio", "0.2"]) == 0
    assert "transformer" in capsys.readouterr().out
    assert cli.main(["bench", folder, "--steps", "2", "--rounds", "1", "--mask-ratio", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "times as fast" in out
    assert "32x32, 2 steps" in out
    assert cli.main(["bench", folder, "--mask-ratio", "1.5"]) == 2


@pytest.mark.slow
def test_forecasts_are_fitted_and_kept_together(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from maskfx.runtime.reuse.fitted_forecast import load_table

    out = tmp_path / "forecasts.json"
    line = [
        "fit-forecast",
        folder,
        "--runs",
        "2",
        "--every",
        "3",
        "--strength",
        "1",
        "--out",
        str(out),
    ]
    for steps in ("6", "8"):
        assert cli.main([*line, "--steps", steps]) == 0
        assert f"{steps} calls of which" in capsys.readouterr().out
    table = load_table(out)
    assert table.denoiser == "transformer"
    assert [len(run.times) for run in table.runs] == [6, 8]
    assert all(
        set(run.weights) | set(run.computed) == {*range(len(run.times))} for run in table.runs
    )
    picture = tmp_path / "picture.png"
    Image.new("RGB", (40, 30), "red").save(picture)
    for more in ([], ["--picture", str(picture)]):
        assert cli.main([*line, "--steps", "6", "--edits", *more]) == 0
        assert "edits, 6 calls of which" in capsys.readouterr().out
    runs = load_table(out).runs
    assert [(len(run.times), run.masked) for run in runs] == [(6, False), (8, False), (6, True)]
    out.write_text("{}")
    assert cli.main([*line, "--steps", "6"]) == 2
    assert "can't be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_judge_is_trained_and_decides(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import maskfx
    from maskfx.runtime.reuse.judges import load_judge
    from maskfx.serve.models.model_source import load_pipeline

    out = tmp_path / "judge.npz"
    line = ["train-judge", folder, "--runs", "3", "--steps", "6", "--age", "2", "--side", "2"]
    assert cli.main([*line, "--tolerance", "0.02", "--out", str(out)]) == 0
    assert "the table decides as the forest" in capsys.readouterr().out
    judge = load_judge(out)
    card = json.loads(out.with_suffix(".json").read_text())
    assert card == judge.card
    assert card["features"] == ["change", "stretch", "age", "noise"]
    assert 0 <= card["accuracy"] <= 1
    pipe = load_pipeline(folder, "float32", "cpu")
    quality = maskfx.Quality(patches=maskfx.PatchReuse(judge=out, side=2))
    state = maskfx.compile(pipe, quality=quality)._maskfx
    assert state.quality.patch_reuse.decides is judge
    assert cli.main([*line[:2], "--runs", "1"]) == 2
    assert cli.main([*line, "--tolerance", "0"]) == 2
