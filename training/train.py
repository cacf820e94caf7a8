"""Train one of the reference models, or go on with it.

    python -m training.train --model vae4 --hours 3 --goal psnr=30

The order is vae4, text, unet, t5, dit: a denoiser needs the autoencoder, which is frozen then, and
begins from text encoders that know the words; the UNet teaches the transformer.
`sepia` and `blueprint` are LoRAs, and `edges` a ControlNet, of the UNet that the package ships.
`training.resume` begins from the weights that the package ships.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from training.loop import Run, Task

RUNS = Path(__file__).resolve().parent / "runs"
MODELS = ("vae4", "text", "unet", "t5", "dit", "probe")
ADAPTERS = ("sepia", "blueprint", "edges", "style_probe")


def make_task(model: str, runs: Path, device: torch.device) -> Task:
    wide = device.type == "cuda"
    if model == "vae4":
        from training.vae import VaeTask

        return VaeTask(4, device, 16 if wide else 1)
    if model == "probe":
        from training.probe import ProbeTask

        return ProbeTask()
    if model in ("text", "t5"):
        from training.words import PiecesTask, TextTask

        return TextTask(runs) if model == "text" else PiecesTask(runs)
    if model == "unet":
        from training.unet import UnetTask

        return UnetTask(runs, device, batch=128 if wide else 8)
    if model in ("sepia", "blueprint"):
        from training.adapters import StyleTask

        return StyleTask(model, runs, device)
    if model == "edges":
        from training.adapters import EdgesTask

        return EdgesTask(runs, device)
    if model == "style_probe":
        from training.style_probe import StyleProbeTask

        return StyleProbeTask()
    from training.dit import DitTask

    return DitTask(runs, device, batch=128 if wide else 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, *ADAPTERS], required=True)
    parser.add_argument("--hours", type=float, required=True, help="go on for so long")
    parser.add_argument(
        "--goal", nargs="*", default=[], help="stop when judged figures are reached: psnr=29"
    )
    parser.add_argument(
        "--cool",
        type=float,
        default=0.0,
        help="hours at the end in which the rate falls",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=RUNS, help="checkpoints, logs, latents")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = Run(make_task(args.model, args.runs, device), args.runs / args.model)
    print(f"{args.model} on {device}: from step {run.step}, {run.seconds / 3600:.2f} h so far")
    goal = {key: float(least) for key, least in (one.split("=") for one in args.goal)}
    run.train(args.hours * 3600, goal=goal, cool=args.cool * 3600)
    print(f"{args.model}: step {run.step}, {run.seconds / 3600:.2f} h; {run.checkpoint}")
    if run.stopped:  # what was to come after this training shouldn't
        sys.exit(143)


if __name__ == "__main__":
    main()
