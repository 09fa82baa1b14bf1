from __future__ import annotations
import collections.abc
import torch
import typing
__all__: list[str] = ['Candidate', 'LayerProfile', 'Namespace', 'NativeLayer', 'Pipeline', 'Prediction', 'Profile', 'ProfileOptions', 'RandomScope', 'RunOptions', 'SkipProfile', 'Suggestion', 'Timeline', 'begin_layer', 'draw_seed', 'is_checkpointing', 'is_recomputing', 'keep_for_recompute', 'kept_for_recompute', 'pop', 'predict', 'profile', 'read_snapshot', 'resnet', 'reuse_cpu_memory', 'scope_generator', 'stash', 'suggest', 'torch_version', 'unet']
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
        """
        How many workers there were.
        """
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
        """
        Seconds of its backward.
        """
    @property
    def buffers(self) -> int:
        """
        Bytes of its buffers.
        """
    @property
    def forward(self) -> float:
        """
        Seconds of a forward that builds its graph.
        """
    @property
    def gradients(self) -> int:
        """
        Bytes of the gradients of parameters that require one.
        """
    @property
    def name(self) -> str:
        """
        As the Sequential names it.
        """
    @property
    def optimizer(self) -> int:
        """
        Bytes that the optimizer keeps of them.
        """
    @property
    def output(self) -> int:
        """
        Bytes that it passes on to the next layer.
        """
    @property
    def parameters(self) -> int:
        """
        Bytes of its parameters.
        """
    @property
    def recompute(self) -> float:
        """
        Seconds of the forward again, which builds the graph.
        """
    @property
    def saved(self) -> int:
        """
        Bytes that it allocates in its forward and a backward will need.
        """
    @property
    def stored(self) -> float:
        """
        Seconds of a forward without a graph, in a cell that will be recomputed.
        """
class SkipProfile:
    """
    A skip, by the indices of the layers that hold its ends.
    """
    @property
    def bytes(self) -> int:
        """
        Its bytes, for one micro-batch.
        """
    @property
    def from_layer(self) -> int:
        """
        The index of the layer that stashes it.
        """
    @property
    def name(self) -> str:
        """
        As the layers name it.
        """
    @property
    def to_layer(self) -> int:
        """
        The index of the layer that pops it.
        """
class Profile:
    """
    What a model's layers cost for micro-batches of one size.
    """
    @staticmethod
    def from_json(text: str) -> Profile:
        """
        What to_json() made. Raises ValueError, which says what is wrong and where.
        """
    def __str__(self) -> str:
        ...
    def balance_by_size(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str = 'except_last', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]:
        """
        The balance whose largest stage needs the fewest bytes, skips included.
        """
    def balance_by_time(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: str = 'never', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]:
        """
        The balance whose slowest stage is fastest.
        """
    def table(self, balance: collections.abc.Sequence[typing.SupportsInt] = []) -> str:
        """
        For people: a row for each layer, and the sums of each stage of a balance.
        """
    def to_json(self) -> str:
        """
        For people and for files.
        """
    @property
    def device(self) -> str:
        """
        Where it was measured.
        """
    @property
    def intraop_threads(self) -> int:
        """
        Threads that one operator could use.
        """
    @property
    def layers(self) -> list[LayerProfile]:
        """
        The layers, in order.
        """
    @property
    def samples(self) -> int:
        """
        Samples in a micro-batch.
        """
    @property
    def skips(self) -> list[SkipProfile]:
        """
        The skips.
        """
    @property
    def workers(self) -> int:
        """
        How many stages ran at once while it was measured.
        """
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
        """
        Of which it is.
        """
    @property
    def bubble(self) -> float:
        """
        Idle time over the time of all workers, from 0 to 1.
        """
    @property
    def bytes(self) -> list[int]:
        """
        Most in use at once on each stage, of parameters, gradients, optimizer's state, buffers and activations.
        """
    @property
    def seconds(self) -> float:
        """
        Of a step.
        """
    @property
    def stages(self) -> list[float]:
        """
        Seconds of each stage's actions for one micro-batch, forward to backward.
        """
    @property
    def timeline(self) -> Timeline:
        """
        What was simulated; its bytes are those above what is always there.
        """
class Candidate:
    """
    A way to run a model, and what it is predicted to cost.
    """
    @property
    def balance(self) -> list[int]:
        """
        How many layers each stage has.
        """
    @property
    def bubble(self) -> float:
        """
        Idle time over the time of all workers, from 0 to 1.
        """
    @property
    def bytes(self) -> list[int]:
        """
        Most in use at once, of each stage.
        """
    @property
    def checkpoint(self) -> str:
        """
        The checkpoint mode.
        """
    @property
    def chunks(self) -> int:
        """
        Micro-batches of a mini-batch.
        """
    @property
    def fits(self) -> bool:
        """
        Whether that is within the limit.
        """
    @property
    def seconds(self) -> float:
        """
        Of a step, forward and backward of the mini-batch.
        """
class Suggestion:
    """
    The ways to run a model, the best first.
    """
    def __str__(self) -> str:
        ...
    def profile_of(self, candidate: Candidate) -> Profile:
        """
        The profile that one of the candidates was made from.
        """
    @property
    def best(self) -> Candidate:
        """
        The first candidate. Raises RuntimeError, with the reason, when nothing fits.
        """
    @property
    def candidates(self) -> list[Candidate]:
        """
        One for each number of chunks and checkpoint mode; the fastest that fits comes first.
        """
    @property
    def fits(self) -> bool:
        """
        Whether any candidate does.
        """
    @property
    def reason(self) -> str:
        """
        Why nothing fits; empty when something does.
        """
    @property
    def unpartitioned(self) -> Candidate | None:
        """
        The whole mini-batch on one device, without a pipeline; None if the model does not run that way.
        """
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
def begin_layer(stage: typing.Any, layer: typing.SupportsInt) -> None:
    ...
def draw_seed() -> int:
    ...
def is_checkpointing() -> bool:
    """
    Whether the calling layer's forward will be recomputed. Its graph is not kept.
    """
def is_recomputing() -> bool:
    """
    Whether the calling layer's forward is a recomputation, before its backward.
    """
def keep_for_recompute(object: typing.Any) -> None:
    ...
def kept_for_recompute() -> typing.Any:
    ...
def pop(arg0: Namespace, arg1: str) -> typing.Any:
    ...
def predict(arg0: Profile, arg1: collections.abc.Sequence[typing.SupportsInt], arg2: RunOptions) -> Prediction:
    ...
def profile(arg0: list[typing.Any], arg1: typing.Any, arg2: ProfileOptions) -> Profile:
    ...
def read_snapshot(path: typing.Any) -> typing.Any:
    """
    The dict in a snapshot's file, checked.
    """
def resnet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: bool) -> list[NativeLayer]:
    ...
def reuse_cpu_memory(on: bool = True) -> None:
    """
    From now on, or with False no longer, CPU tensors of 64 KiB and more take their memory from a pool.
    
    The pool keeps what is freed for the next tensor of about that size: a training step then asks the system for no memory
    once the first few have run. It belongs to the process and never shrinks. Call this first, before tensors are made in
    other threads.
    """
def scope_generator(device: str) -> torch.Generator | None:
    ...
def stash(arg0: Namespace, arg1: str, arg2: typing.Any) -> None:
    ...
def suggest(arg0: list[typing.Any], arg1: typing.Any, arg2: collections.abc.Sequence[str], arg3: collections.abc.Sequence[typing.SupportsInt], arg4: collections.abc.Sequence[str], arg5: typing.SupportsInt, arg6: typing.SupportsFloat, arg7: ProfileOptions) -> Suggestion:
    ...
def unet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: typing.SupportsInt, arg4: typing.SupportsInt, arg5: typing.SupportsFloat, arg6: typing.SupportsInt, arg7: str) -> list[NativeLayer]:
    ...
torch_version: str = '2.11.0'
