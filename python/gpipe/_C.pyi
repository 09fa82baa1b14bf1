# The public classes, in the words of pybind11_stubgen. The rest is the package's own.
from __future__ import annotations
import collections.abc
import torch
import typing
def __getattr__(name: str) -> typing.Any: ...
class Timeline:
    def __init__(self) -> None: ...
    def bubble(self) -> float: ...
    def clear(self) -> None: ...
    def makespan(self) -> float: ...
    def peak_bytes(self) -> list[int]: ...
    def to_chrome_json(self) -> str: ...
    def to_html(self) -> str: ...
    def to_json_lines(self) -> str: ...
    workers: typing.Final[int]
class LayerProfile:
    backward: typing.Final[float]
    buffers: typing.Final[int]
    forward: typing.Final[float]
    gradients: typing.Final[int]
    input_gradient: typing.Final[float]
    name: typing.Final[str]
    optimizer: typing.Final[int]
    output: typing.Final[int]
    parameters: typing.Final[int]
    saved: typing.Final[int]
    stored: typing.Final[float]
    weight_gradient: typing.Final[float]
class SkipProfile:
    bytes: typing.Final[int]
    from_layer: typing.Final[int]
    name: typing.Final[str]
    reader_layers: typing.Final[list[int]]
class TieProfile:
    bytes: typing.Final[int]
    layers: typing.Final[list[int]]
    name: typing.Final[str]
class Profile:
    @staticmethod
    def from_json(text: str) -> Profile: ...
    def __str__(self) -> str: ...
    def balance_by_size(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str | int = 'except_last', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]: ...
    def balance_by_time(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str | int = 'never', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]: ...
    def cut_bytes(self) -> list[int | None]: ...
    def table(self, balance: collections.abc.Sequence[typing.SupportsInt] = []) -> str: ...
    def to_json(self) -> str: ...
    device: typing.Final[str]
    intraop_threads: typing.Final[int]
    layers: typing.Final[list[LayerProfile]]
    samples: typing.Final[int]
    skips: typing.Final[list[SkipProfile]]
    ties: typing.Final[list[TieProfile]]
    workers: typing.Final[int]
class Prediction:
    def __str__(self) -> str: ...
    balance: typing.Final[list[int]]
    bubble: typing.Final[float]
    bytes: typing.Final[list[int]]
    placement: typing.Final[list[int]]
    seconds: typing.Final[float]
    stages: typing.Final[list[float]]
    timeline: typing.Final[Timeline]
class Plan:
    def save(self, path: typing.Any) -> None: ...
    arguments: typing.Final[dict[str, typing.Any]]
    balance: typing.Final[list[int]]
    bubble: typing.Final[float]
    bytes: typing.Final[list[int]]
    checkpoint: typing.Final[typing.Literal["always", "except_last", "never"] | int | collections.abc.Sequence[str | int]]
    chunks: typing.Final[int]
    crossing: typing.Final[int]
    fits: typing.Final[bool]
    measured: typing.Final[float]
    placement: typing.Final[list[int]]
    reduction: typing.Final[float]
    replicas: typing.Final[int]
    schedule: typing.Final[str]
    seconds: typing.Final[float]
class Plans:
    def __str__(self) -> str: ...
    best: typing.Final[Plan]
    fits: typing.Final[bool]
    plans: typing.Final[list[Plan]]
    reason: typing.Final[str]
    least_seconds: typing.Final[float]
    more_memory_saves: typing.Final[float]
    unpartitioned: typing.Final[Plan | None]
def is_checkpointing() -> bool: ...
def is_recomputing() -> bool: ...
