"""Diffusers pipelines whose denoisers compute only what is masked."""
