"""One step of a denoiser, beside its dense run."""
