"""For scikit-build-core: the package needs the minor version of torch that it is built for."""

from importlib.metadata import version


def dynamic_metadata(field, settings=None):
    major, minor, *_ = version("torch").split(".")
    return [f"torch=={major}.{minor}.*"]
