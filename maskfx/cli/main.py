"""The command `maskfx`: arguments only. Each command imports its implementation when it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

import maskfx
from maskfx.cli.options import (
    Config,
    DataType,
    Device,
    Directory,
    Model,
    ModelOption,
    More,
    Prompts,
    given,
    settled,
)
from maskfx.errors import InputError

# extras of pyproject.toml, and the packages that they install, as an import names them
EXTRAS = {
    "serve": (
        *("fastapi", "uvicorn", "python_multipart", "pydantic", "msgspec", "isal", "zmq"),
        *("httpx", "prometheus_client", "structlog", "psutil"),
    ),
    "diffusers": ("diffusers", "transformers", "accelerate"),
    "export": ("onnx", "onnx_ir", "onnxscript", "onnxruntime"),
    "ray": ("ray",),
    "tensorrt": ("tensorrt_rtx",),
    "torch-tensorrt": ("torch_tensorrt",),
}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
cache = typer.Typer(no_args_is_help=True, help="A directory or URL of recorded steps.")
app.add_typer(cache, name="cache")
adapters = typer.Typer(no_args_is_help=True, help="LoRA files.")
app.add_typer(adapters, name="adapters")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    command = typer.main.get_command(app)
    try:
        with extras_named():
            status = command.main(
                None if arguments is None else list(arguments), "maskfx", standalone_mode=False
            )
    except InputError as error:
        print(f"maskfx: {error}", file=sys.stderr)
        return 2
    except typer.Abort:
        return 130
    except Exception as error:
        if not isinstance(getattr(error, "exit_code", None), int):  # not the parser's
            raise
        show(error)
        return error.exit_code  # type: ignore[attr-defined, no-any-return]
    return int(status or 0)


def print_version(asked: bool) -> None:
    if asked:
        print(f"maskfx {maskfx.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Edits at the cost of the mask."""


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise InputError for an absent package of an extra; it names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = next((extra for extra, packages in EXTRAS.items() if name in packages), None)
        if extra is None:
            raise
        raise InputError(
            f"this command needs the package {name}, which isn't installed; install it with: "
            f"pip install 'maskfx[{extra}]'"
        ) from error


def show(error: object) -> None:
    """Print what is wrong with the command line."""
    if hasattr(error, "show"):
        error.show()


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str | None, given("The address to listen at.")] = None,
    port: Annotated[int | None, given("0: any that is free.")] = None,
    api_key: Annotated[str | None, given("What clients must send. Better: MASKFX_API_KEY.")] = None,
    served_model_name: Annotated[str | None, given("The model's name for clients.")] = None,
    max_num_seqs: Annotated[int | None, given("Requests that a worker runs at once.")] = None,
    shutdown_timeout: Annotated[float | None, given("Seconds to finish requests.")] = None,
    workers: Annotated[int | None, given("Processes with the model.")] = None,
    executor: Annotated[str | None, given("What starts workers: processes or ray.")] = None,
    address: Annotated[
        str | None, given("Of a Ray cluster: auto, HOST:PORT, ray://HOST:PORT; else one starts.")
    ] = None,
    ranks: Annotated[int | None, given("Processes that share a worker's steps.")] = None,
    rank_devices: Annotated[str | None, given("Of each of them, such as cuda:0,cuda:1.")] = None,
    quality: Annotated[str | None, given("fast, balanced or faithful.")] = None,
    record_at: Annotated[
        str | None, given("Templates: at first-edit, second-edit, or in idle time.")
    ] = None,
    device: Device = None,
    dtype: Annotated[str | None, given("float32, bfloat16 or float16.")] = None,
    helpers: Annotated[str | None, given("Encoders beside the steps: auto, on or off.")] = None,
    cache_dir: Annotated[str | None, given("Templates: a directory, or a URL.")] = None,
    lora_dir: Annotated[Path | None, given("*.safetensors that requests may name.")] = None,
    controlnets: Annotated[
        list[str] | None, given("Folder, hub id or shipped name; repeatable.", "--controlnet")
    ] = None,
    ip_adapters: Annotated[
        list[str] | None, given("A safetensors file, or its folder; repeatable.", "--ip-adapter")
    ] = None,
    log_level: Annotated[str | None, given("debug, info, warning or error.")] = None,
    otlp_endpoint: Annotated[str | None, given("Where OpenTelemetry's spans go.")] = None,
    more: More = None,
    config: Config = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the settings and where each is from.")
    ] = False,
) -> int:
    """Serve a model over HTTP, with OpenAI's image routes."""
    named = {name: value for name, value in locals().items() if name in served_options()}
    named["ray.address"] = address
    effective = settled(named, more, config)
    if print_config:
        from maskfx.serve.sources import shown

        print(shown(effective))
        return 0
    launch: ModuleType = import_module("maskfx.serve.launch")
    return int(launch.serve(effective.settings))


def served_options() -> set[str]:
    from maskfx.serve.sources import known_keys

    return set(known_keys())


@app.command()
def edit(
    image: Annotated[Path, typer.Argument(help="The picture to edit.")],
    prompt: Annotated[str, typer.Option(help="What the masked part shall be.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")],
    mask: Annotated[
        Path | None, given("A picture of the same size; without it the image's own alpha.")
    ] = None,
    mask_mode: Annotated[
        str, typer.Option(help="alpha: transparent is edited. luminance: white is edited.")
    ] = "alpha",
    model: ModelOption = None,
    server: Annotated[str | None, given("The URL of a running server, to edit there.")] = None,
    api_key: Annotated[str | None, given("The server's key. Better: MASKFX_API_KEY.")] = None,
    seed: Annotated[int | None, given("The same seed makes the same picture.")] = None,
    steps: Annotated[int | None, given("Denoising steps.")] = None,
    guidance: Annotated[float | None, given("How much the prompt weighs.")] = None,
    strength: Annotated[float | None, given("How far from the picture, 0 to 1.")] = None,
    negative_prompt: Annotated[str | None, given("What it shall not be.")] = None,
    quality: Annotated[str | None, given("fast, balanced or faithful; local only.")] = None,
    config: Config = None,
) -> int:
    """Edit one image, locally or on a server."""
    options = {name: value for name, value in locals().items() if value is not None}
    from maskfx.cli.edit import check_out, edit_here, edit_there, read_edit
    from maskfx.cli.edit_request import EditCall
    from maskfx.serve.request import parameters_of

    parameters = {n: v for n, v in options.items() if n in parameters_of() and n != "quality"}
    call = EditCall(*read_edit(image, mask, mask_mode), parameters)
    if server is not None:
        if model is not None or quality is not None or config is not None:
            raise InputError(
                "--server edits with the model and settings of the server; leave --model, "
                "--quality and --config out"
            )
        check_out(out)
        return edit_there(call, out, server, api_key)
    if api_key is not None:
        raise InputError("--api-key applies to a server; give --server too, or leave it out")
    call.check()
    check_out(out)
    return edit_here(call, out, settled({"model": model, "quality": quality}, None, config))


@app.command()
def explain(
    model: Model = None,
    mask_ratio: Annotated[float, typer.Option(help="The masked share of the picture.")] = 0.1,
    more: More = None,
    config: Config = None,
) -> int:
    """Show what the compiler did to a model, and what an edit of it costs."""
    from maskfx.cli.try_model import explain_model

    return explain_model(settled({"model": model}, more, config).settings, mask_ratio)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The directory to write; it must not exist.")],
    model: Model = None,
    format: Annotated[
        str, typer.Option(help="onnx, aoti, pt2, tensorrt or torch_tensorrt.")
    ] = "onnx",
    mode: Annotated[
        str, typer.Option(help="mask_cache, or dense: the graph that computes all sites, alone.")
    ] = "mask_cache",
    part: Annotated[str, typer.Option(help="masked, record, dense or all.")] = "all",
    operators: Annotated[
        bool, typer.Option("--operators", help="Keep maskfx's operators; for aoti and pt2.")
    ] = False,
    opset: Annotated[int | None, given("Of ONNX.")] = None,
    verify: Annotated[bool | None, given("Compare each graph, if feasible.")] = None,
    compare: Annotated[bool, typer.Option(help="Run the model, and compare with it.")] = True,
    profile: Annotated[
        list[str] | None,
        given("Of engines: a range of sizes, such as rows=64:1024:4096; may be repeated."),
    ] = None,
    layout: Annotated[str, typer.Option(help="triton adds a model repository.")] = "plain",
    dtype: Annotated[str | None, given("float32, bfloat16 or float16.")] = None,
    more: More = None,
    config: Config = None,
) -> int:
    """Write a model's denoisers as graphs for other runtimes, with its other parts."""
    from maskfx.cli.export_model import export_model, part_of
    from maskfx.export.options import Options

    part = part_of(mode, part)
    options = Options(format, part, operators, opset, verify, tuple(profile or ()), layout, compare)
    settings = settled({"model": model, "dtype": dtype}, more, config).settings
    return export_model(settings, out, options, dtype)


@app.command("train-judge")
def train_judge(
    model: Model = None,
    out: Annotated[
        Path | None, given("The file to write; default: judge.npz in its folder.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Pictures to make; a quarter is held out.")] = 8,
    steps: Annotated[int | None, given("Denoising steps.")] = None,
    age: Annotated[int, typer.Option(help="The most steps that a patch is kept.")] = 6,
    side: Annotated[int, typer.Option(help="Latent sites along a patch's side.")] = 8,
    tolerance: Annotated[
        float, typer.Option(help="The relative error of a patch's output that isn't tolerated.")
    ] = 0.1,
    prompt: Prompts = None,
    device: Device = None,
    dtype: DataType = None,
    config: Config = None,
) -> int:
    """Train what decides which patches of a model are computed (maskfx.PatchReuse)."""
    from maskfx.cli.train_judge import train_judge_of

    settings = settled({"model": model, "device": device, "dtype": dtype}, None, config).settings
    return train_judge_of(settings, out, runs, steps, age, side, tolerance, prompt or ())


@app.command("fit-forecast")
def fit_forecast(
    model: Model = None,
    out: Annotated[
        Path | None, given("The file to write or extend; default: forecasts.json in its folder.")
    ] = None,
    every: Annotated[int, typer.Option(help="About one in this many steps is computed.")] = 5,
    least: Annotated[int, typer.Option(help="Steps that are computed at least.")] = 2,
    steps: Annotated[int | None, given("Denoising steps.")] = None,
    strength: Annotated[float | None, given("How far from a picture, 0 to 1.")] = None,
    runs: Annotated[int, typer.Option(help="Pictures to make, and as many again per gap.")] = 12,
    edits: Annotated[bool, typer.Option("--edits", help="Of edits under masks instead.")] = False,
    picture: Annotated[
        list[Path] | None, given("A picture to edit, with --edits; may be repeated.")
    ] = None,
    prompt: Prompts = None,
    device: Device = None,
    dtype: DataType = None,
    config: Config = None,
) -> int:
    """Fit how the outputs of skipped steps follow from others (Quality(forecast="fitted"))."""
    from maskfx.cli.fit_forecast import fit_forecast_of, pixels_of

    settings = settled({"model": model, "device": device, "dtype": dtype}, None, config).settings
    pictures = pixels_of(picture or (), edits)
    fitted = every, least, steps, strength, runs, prompt or (), edits, pictures
    return fit_forecast_of(settings, out, *fitted)


@app.command()
def bench(
    model: Model = None,
    mask_ratio: Annotated[float, typer.Option(help="The masked share of the picture.")] = 0.1,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 10,
    size: Annotated[int | None, given("Sides of the picture in pixels.")] = None,
    rounds: Annotated[int, typer.Option(help="Alternating rounds; medians are printed.")] = 3,
    more: More = None,
    config: Config = None,
) -> int:
    """Compare dense and masked edits of one model in one run."""
    from maskfx.cli.try_model import bench_model

    settings = settled({"model": model}, more, config).settings
    return bench_model(settings, mask_ratio, steps, size, rounds)


@cache.command()
def ls(directory: Directory) -> int:
    """List entries, least recently used first."""
    from maskfx.cli import cache as stored

    return stored.ls(directory)


@cache.command()
def verify(directory: Directory) -> int:
    """Read every entry and remove damaged ones; exit status 1 if there were any."""
    from maskfx.cli import cache as stored

    return stored.verify(directory)


@cache.command()
def gc(
    directory: Directory,
    budget: Annotated[int | None, given("Bytes that may stay.")] = None,
    ttl: Annotated[float | None, given("Remove entries unused for this number of seconds.")] = None,
) -> int:
    """Remove entries unused for too long or over budget, and leftovers of dead writers."""
    from maskfx.cli import cache as stored

    return stored.gc(directory, budget, ttl)


@adapters.command()
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for serve.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A safetensors file.")],
    prompt: Annotated[list[str] | None, given("A prompt; may be repeated.")] = None,
    weight: Annotated[float, typer.Option(help="Factor of the adapter.")] = 1.0,
    steps: Annotated[int | None, given("Denoising steps; the model's own by default.")] = None,
    cosine: Annotated[float, typer.Option(help="Similarity below which latents differ.")] = 0.99,
    more: More = None,
    config: Config = None,
) -> int:
    """Find the first step at which a LoRA acts on a model, and write it beside the file.

    Requests then begin before the file is read, and wait for it at that step at most.
    """
    from maskfx.cli import adapters as profiled

    settings = settled({"model": model}, more, config).settings
    return profiled.profile(settings, adapter, prompt or [], weight, steps, cosine)


@app.command()
def env() -> None:
    """Print versions for bug reports."""
    from maskfx.cli.environment import print_environment

    print_environment()


@app.command()
def demo(
    name: Annotated[str | None, typer.Argument(help="A trained pipeline of the package.")] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Edit with its LoRAs and ControlNets.")
    ] = False,
) -> None:
    """Run a first edit on the CPU."""
    from maskfx.cli import demo, demo_adapters

    (demo_adapters if adapters else demo).main(name)
