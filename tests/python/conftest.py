"""Settings of all tests."""

import os

import pytest
import torch


# Every stage uses as many threads as one stage does, and small models do not wait for threads.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    """Skips tests that take long, unless tests/long runs them."""
    for item in items:
        if item.get_closest_marker("long") and "GPIPE_LONG" not in os.environ:
            item.add_marker(pytest.mark.skip("takes long: run tests/long python"))


def long(*arguments):
    """Marks parameters whose test takes long."""
    return pytest.param(*arguments, marks=pytest.mark.long)
