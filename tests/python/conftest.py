"""Fixtures of several tests."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Runs each operator on one thread. So every stage uses as many as one stage does, and small models do not wait for
    threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
