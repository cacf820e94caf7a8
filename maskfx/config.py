"""Frozen compile settings, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass

from maskfx.errors import InputError

MODES = ("mask_cache", "patch_batch", "dense")


@dataclass(frozen=True)
class Settings:
    """How a denoiser is compiled.

    Args:
        mode: "mask_cache" records and edits. "patch_batch" records no templates: edits compute the
            whole picture. It batches the dense calls of several requests, of any sizes: in rows, as
            one ragged batch, or by one call of the module per size, whichever measures faster for
            their number, sizes and sites; so does "mask_cache" on a CPU, for requests of several
            sizes, after a recording or an edit. Patches that hardly change are kept from step to
            step where the quality asks for it (`Quality.patches`). "dense" leaves the module as it
            is; requests of one size share its calls.
        inductor: compile the rewritten graph with Inductor, with symbolic row counts.
        cuda_graphs: replay one CUDA graph of a batch's whole step if its layout comes again, which
            None does too. With True, new layouts run in parts between attentions, whose graphs are
            for row counts padded to a few sizes, where `inductor` is off; on other devices these
            parts run one after another.
        prepack: keep weights in the layout that the matrix library wants (twice the weight memory).
        plans: let an EditStep's plan choose which keys and values are loaded and which are
            projected again from loaded inputs; recordings keep both. None plans where recorded
            rows cross a link to the device, from host memory to a GPU, and where a pipeline keeps
            them in a store: then of a CPU's recordings only keys and values.
        programs: a directory in which compiled programs are kept: a process that starts with the
            same module, versions and settings captures nothing. By default programs are not kept.
        stretches: let an EditStep's `wide` choose where blocks compute more than the mask;
            recordings also keep the values between blocks. A stretch is a run of consecutive blocks
            with one row set.
    """

    mode: str = "mask_cache"
    inductor: bool = False
    cuda_graphs: bool | None = None
    prepack: bool = False
    plans: bool | None = False
    stretches: bool = False
    programs: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise InputError(f"mode={self.mode!r:.60}: choose one of {', '.join(MODES)}")
        for name in ("inductor", "prepack", "stretches", "cuda_graphs", "plans"):
            value, optional = getattr(self, name), name in ("cuda_graphs", "plans")
            if type(value) is not bool and not (value is None and optional):
                wanted = "True, False or None" if optional else "True or False"
                raise InputError(f"{name}={value!r:.60}: give {wanted}")
