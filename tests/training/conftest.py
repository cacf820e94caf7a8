from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """The other tests run without."""
    with torch.enable_grad():
        yield
