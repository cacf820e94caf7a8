"""torch.export of a denoiser, and the calls that a capture serves."""
