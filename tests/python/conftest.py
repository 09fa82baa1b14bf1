"""Fixtures of several tests."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Skips tests that take long, unless tests/long runs them."""
    for item in items:
        if item.get_closest_marker("long") and "GPIPE_LONG" not in os.environ:
            item.add_marker(pytest.mark.skip("takes long: run tests/long python"))


def long(*arguments):
    """Marks parameters whose test takes long."""
    return pytest.param(*arguments, marks=pytest.mark.long)


@pytest.fixture
def one_thread():
    """Runs each operator on one thread. So every stage uses as many as one stage does, and small models do not wait for
    threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
