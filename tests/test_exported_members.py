"""The public names of maskfx. A change here changes the interface: say so in CHANGELOG.md."""

import maskfx

EXPORTED = [
    "Budget",
    "CacheError",
    "CaptureError",
    "CompiledDenoiser",
    "DenseStep",
    "EditSession",
    "EditStep",
    "Engine",
    "InputError",
    "Loader",
    "MaskError",
    "MaskfxError",
    "Masks",
    "Processes",
    "Quality",
    "RecordStep",
    "ReusePolicy",
    "StepCache",
    "Template",
    "Templates",
    "Waiting",
    "compile",
    "decompile",
    "editing",
    "explain",
    "reference",
    "template",
]


def test_exports_exactly_these_names_in_order():
    assert list(maskfx.__all__) == EXPORTED
    assert sorted(EXPORTED) == EXPORTED


def test_every_exported_name_exists():
    missing = [name for name in EXPORTED if not hasattr(maskfx, name)]
    assert missing == []
