from __future__ import annotations
import collections.abc
import typing
__all__: list[str] = ['Begin', 'Candidate', 'LayerProfile', 'Namespace', 'NativeLayer', 'Pipeline', 'Prediction', 'Profile', 'ProfileOptions', 'RandomScope', 'RunOptions', 'SkipProfile', 'Suggestion', 'Timeline', 'draw_seed', 'is_checkpointing', 'is_recomputing', 'pop', 'predict', 'profile', 'resnet', 'reuse_cpu_memory', 'stash', 'suggest', 'torch_version', 'unet']
class Namespace:
    @staticmethod
    def shared() -> Namespace:
        ...
    def __init__(self) -> None:
        ...
class RandomScope:
    def __init__(self, arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt) -> None:
        ...
    def close(self) -> None:
        ...
class Timeline:
    """
    What happened on a pipeline's workers, or is predicted to happen.
    """
    def __init__(self) -> None:
        ...
    def _repr_svg_(self) -> str:
        ...
    def bubble(self) -> float:
        """
        The share of the workers' time that none of them used.
        """
    def makespan(self) -> float:
        """
        Seconds from the first action's start to the last one's end.
        """
    def peak_bytes(self) -> list[int]:
        """
        Of each worker, the most bytes in use for its cells at once.
        """
    def to_chrome_json(self) -> str:
        """
        Chrome's trace event format, which ui.perfetto.dev opens.
        """
    def to_svg(self) -> str:
        """
        A drawing: a row for each worker, a box for each action.
        """
    @property
    def workers(self) -> int:
        ...
class Begin:
    def __call__(self, arg0: typing.SupportsInt) -> None:
        ...
class Pipeline:
    def __init__(self, stages: list[typing.Any], devices: collections.abc.Sequence[str], deferred_batch_norm: bool) -> None:
        ...
    def forward(self, input: typing.Any, chunks: typing.SupportsInt, checkpoint: str) -> typing.Any:
        ...
    def trace(self, timeline: Timeline | None) -> None:
        ...
class LayerProfile:
    """
    What one layer costs for one micro-batch: seconds and bytes.
    """
    @property
    def backward(self) -> float:
        ...
    @property
    def buffers(self) -> int:
        ...
    @property
    def forward(self) -> float:
        ...
    @property
    def gradients(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def optimizer(self) -> int:
        ...
    @property
    def output(self) -> int:
        ...
    @property
    def parameters(self) -> int:
        ...
    @property
    def recompute(self) -> float:
        ...
    @property
    def saved(self) -> int:
        ...
    @property
    def stored(self) -> float:
        ...
class SkipProfile:
    """
    A skip, by the indices of the layers that hold its ends.
    """
    @property
    def bytes(self) -> int:
        ...
    @property
    def from_layer(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def to_layer(self) -> int:
        ...
class Profile:
    """
    What a model's layers cost for micro-batches of one size.
    """
    @staticmethod
    def from_json(text: str) -> Profile:
        ...
    def __str__(self) -> str:
        ...
    def balance_by_size(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str = 'except_last') -> list[int]:
        """
        The balance whose largest stage needs the fewest bytes, skips included.
        """
    def balance_by_time(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str = 'never') -> list[int]:
        """
        The balance whose slowest stage is fastest.
        """
    def table(self, balance: collections.abc.Sequence[typing.SupportsInt] = []) -> str:
        """
        For people: a row for each layer, and the sums of each stage of a balance.
        """
    def to_json(self) -> str:
        ...
    @property
    def device(self) -> str:
        ...
    @property
    def intraop_threads(self) -> int:
        ...
    @property
    def layers(self) -> list[LayerProfile]:
        ...
    @property
    def samples(self) -> int:
        ...
    @property
    def skips(self) -> list[SkipProfile]:
        ...
    @property
    def workers(self) -> int:
        ...
class RunOptions:
    def __init__(self, chunks: typing.SupportsInt, checkpoint: str, bandwidth: typing.SupportsFloat, copies: bool) -> None:
        ...
class Prediction:
    """
    What a step is predicted to cost.
    """
    def __str__(self) -> str:
        ...
    @property
    def balance(self) -> list[int]:
        ...
    @property
    def bubble(self) -> float:
        ...
    @property
    def bytes(self) -> list[int]:
        ...
    @property
    def seconds(self) -> float:
        ...
    @property
    def stages(self) -> list[float]:
        ...
    @property
    def timeline(self) -> Timeline:
        ...
class Candidate:
    """
    A way to run a model, and what it is predicted to cost.
    """
    @property
    def balance(self) -> list[int]:
        ...
    @property
    def bubble(self) -> float:
        ...
    @property
    def bytes(self) -> list[int]:
        ...
    @property
    def checkpoint(self) -> str:
        ...
    @property
    def chunks(self) -> int:
        ...
    @property
    def fits(self) -> bool:
        ...
    @property
    def seconds(self) -> float:
        ...
class Suggestion:
    """
    The ways to run a model, the best first.
    """
    def __str__(self) -> str:
        ...
    def profile_of(self, candidate: Candidate) -> Profile:
        ...
    @property
    def best(self) -> Candidate:
        ...
    @property
    def candidates(self) -> list[Candidate]:
        ...
    @property
    def fits(self) -> bool:
        ...
    @property
    def reason(self) -> str:
        ...
class ProfileOptions:
    def __init__(self, workers: typing.SupportsInt, intraop_threads: typing.SupportsInt, seconds: typing.SupportsFloat, repeats: typing.SupportsInt, param_scale: typing.SupportsFloat, progress: typing.Any) -> None:
        ...
class NativeLayer:
    def clone(self) -> NativeLayer:
        ...
    def describe(self) -> str:
        ...
    def forward(self, arg0: typing.Any) -> typing.Any:
        ...
    def isolate(self, arg0: Namespace, arg1: str) -> None:
        ...
    def skips(self) -> tuple[list[tuple[Namespace, str]], list[tuple[Namespace, str]]]:
        ...
    def tensors(self) -> list[tuple[str, typing.Any, bool]]:
        ...
    def train(self, arg0: bool) -> None:
        ...
    @property
    def name(self) -> str:
        ...
def draw_seed() -> int:
    ...
def is_checkpointing() -> bool:
    """
    Whether the calling layer's forward will be recomputed: no graph is built.
    """
def is_recomputing() -> bool:
    """
    Whether the calling layer's forward is a recomputation, before its backward.
    """
def pop(arg0: Namespace, arg1: str) -> typing.Any:
    ...
def predict(arg0: Profile, arg1: collections.abc.Sequence[typing.SupportsInt], arg2: RunOptions) -> Prediction:
    ...
def profile(arg0: list[typing.Any], arg1: typing.Any, arg2: ProfileOptions) -> Profile:
    ...
def resnet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: bool) -> list[NativeLayer]:
    ...
def reuse_cpu_memory(on: bool = True) -> None:
    """
    From now on, or with False no longer, CPU tensors of 64 KiB and more take their memory from a pool, which keeps
    what is freed for the next of about that size: a training step then asks the system for no memory once the first few
    have run. The pool belongs to the process and never shrinks. Call it first, before tensors are made in other threads.
    """
def stash(arg0: Namespace, arg1: str, arg2: typing.Any) -> None:
    ...
def suggest(arg0: list[typing.Any], arg1: typing.Any, arg2: collections.abc.Sequence[str], arg3: collections.abc.Sequence[typing.SupportsInt], arg4: collections.abc.Sequence[str], arg5: typing.SupportsInt, arg6: typing.SupportsFloat, arg7: ProfileOptions) -> Suggestion:
    ...
def unet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: typing.SupportsInt, arg4: typing.SupportsInt, arg5: typing.SupportsFloat, arg6: typing.SupportsInt, arg7: str) -> list[NativeLayer]:
    ...
torch_version: str = '2.11.0'
