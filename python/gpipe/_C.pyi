from __future__ import annotations
import collections.abc
import torch
import torch.distributed.distributed_c10d
import typing
__all__: list[str] = ['Candidate', 'Cluster', 'ClusterPlan', 'LayerProfile', 'Namespace', 'NativeLayer', 'Pipeline', 'Prediction', 'Profile', 'ProfileOptions', 'RandomScope', 'Ranks', 'RunOptions', 'Scheduling', 'SkipProfile', 'StepOptions', 'Suggestion', 'TieProfile', 'Timeline', 'arrange_workers', 'begin_layer', 'borrowed', 'check_balance', 'check_checkpoint', 'check_chunks', 'check_loss', 'check_skips', 'check_stages', 'draw_seed', 'fills_and_drains', 'gather_snapshot', 'is_checkpointing', 'is_recomputing', 'part_of_snapshot', 'place_stages', 'plan_cluster', 'pop', 'predict', 'profile', 'read_snapshot', 'resnet', 'reuse_cpu_memory', 'save_for_recompute', 'saved_for_recompute', 'schedule_names', 'scope_generator', 'stash', 'suggest', 'torch_version', 'unet', 'v_placement', 'write_snapshot', 'write_weights']
class Ranks:
    @staticmethod
    def from_environment(timeout: typing.SupportsFloat, join_timeout: typing.SupportsFloat, interface: str, replicas: typing.SupportsInt, nccl: bool) -> Ranks:
        ...
    @staticmethod
    def from_group(group: torch.distributed.distributed_c10d.ProcessGroup, timeout: typing.SupportsFloat, join_timeout: typing.SupportsFloat, interface: str, replicas: typing.SupportsInt, nccl: bool) -> Ranks:
        ...
    def finish(self, error: str) -> None:
        ...
    def share(self, text: str) -> str:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def replica(self) -> int:
        ...
    @property
    def replicas(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
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
    The actions of a pipeline's workers, measured or simulated.
    """
    def __init__(self) -> None:
        ...
    def _repr_svg_(self) -> str:
        ...
    def bubble(self) -> float:
        """
        Returns the idle time as a share of the workers' total time, from 0 to 1.
        """
    def makespan(self) -> float:
        """
        Returns the seconds from the start of the first action to the end of the last.
        """
    def peak_bytes(self) -> list[int]:
        """
        Returns for each worker the peak bytes in use for its cells.
        """
    def to_chrome_json(self) -> str:
        """
        Returns the timeline in Chrome's trace event format, which ui.perfetto.dev opens.
        """
    def to_svg(self) -> str:
        """
        Returns a drawing as SVG text: a row per worker, a box per action.
        """
    @property
    def workers(self) -> int:
        """
        Number of workers.
        """
class StepOptions:
    def __init__(self, count: typing.Any | None, reduction: typing.Any, scale: typing.SupportsFloat, return_output: bool, chunks: typing.SupportsInt, checkpoint: typing.Any, check: bool) -> None:
        ...
class Pipeline:
    def __init__(self, stages: list[typing.Any], devices: collections.abc.Sequence[str], schedule: str, placement: collections.abc.Sequence[typing.SupportsInt], deferred_batch_norm: bool, ranks: Ranks | None) -> None:
        ...
    def clip_grad_norm_(self, max_norm: typing.SupportsFloat, norm_type: typing.SupportsFloat, error_if_nonfinite: bool) -> typing.Any:
        ...
    def forward(self, input: typing.Any, chunks: typing.SupportsInt, checkpoint: typing.Any, training: bool) -> typing.Any:
        ...
    def gather(self, bytes: bytes, what: str) -> list[bytes]:
        ...
    def gather_timeline(self, timeline: Timeline) -> Timeline:
        ...
    def largest(self, number: typing.SupportsInt) -> int:
        ...
    def loss(self, input: typing.Any, target: typing.Any, loss: typing.Any, kind: typing.SupportsInt, options: StepOptions) -> typing.Any:
        ...
    def refresh(self) -> bool:
        ...
    def step(self, input: typing.Any, target: typing.Any, loss: typing.Any, kind: typing.SupportsInt, options: StepOptions) -> tuple[typing.Any, typing.Any]:
        ...
    def sum_over_replicas(self, numbers: collections.abc.Sequence[typing.SupportsFloat]) -> list[float]:
        ...
    def trace(self, timeline: Timeline | None) -> None:
        ...
    def withdraw(self, reason: str) -> None:
        ...
    @property
    def busy(self) -> bool:
        ...
class LayerProfile:
    """
    The cost of one layer for one micro-batch, in seconds and bytes.
    """
    @property
    def backward(self) -> float:
        """
        Seconds of the backward.
        """
    @property
    def buffers(self) -> int:
        """
        Bytes of the buffers.
        """
    @property
    def forward(self) -> float:
        """
        Seconds of a forward that builds a graph.
        """
    @property
    def gradients(self) -> int:
        """
        Bytes of the parameters' gradients.
        """
    @property
    def input_gradient(self) -> float:
        """
        Seconds of the first part of a split backward, the gradients of inputs.
        """
    @property
    def name(self) -> str:
        """
        The layer's name in the Sequential.
        """
    @property
    def optimizer(self) -> int:
        """
        Bytes of the optimizer's state.
        """
    @property
    def output(self) -> int:
        """
        Bytes of the output.
        """
    @property
    def parameters(self) -> int:
        """
        Bytes of the parameters.
        """
    @property
    def recompute(self) -> float:
        """
        Seconds of the recompute, which builds the graph.
        """
    @property
    def saved(self) -> int:
        """
        Bytes that the forward allocates and the backward needs.
        """
    @property
    def stored(self) -> float:
        """
        Seconds of a forward without a graph, in a cell that will be recomputed.
        """
    @property
    def weight_gradient(self) -> float:
        """
        Seconds of the second part of a split backward, gradients of parameters.
        """
class SkipProfile:
    """
    The cost of one skip connection for one micro-batch.
    """
    @property
    def bytes(self) -> int:
        """
        Bytes of the stashed tensor.
        """
    @property
    def from_layer(self) -> int:
        """
        Index of the layer that stashes.
        """
    @property
    def name(self) -> str:
        """
        The name that the layers stash and pop.
        """
    @property
    def to_layer(self) -> int:
        """
        Index of the layer that pops.
        """
class TieProfile:
    """
    A parameter that several layers share.
    """
    @property
    def bytes(self) -> int:
        """
        Bytes of the parameter.
        """
    @property
    def layers(self) -> list[int]:
        """
        Indices of the layers.
        """
    @property
    def name(self) -> str:
        """
        Its name in the first layer.
        """
class Profile:
    """
    The cost of a model's layers for micro-batches of one size.
    """
    @staticmethod
    def from_json(text: str) -> Profile:
        """
        Reads the text that to_json() returns. Raises ValueError, with the place and the fault.
        """
    def __str__(self) -> str:
        ...
    def balance_by_size(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: typing.Any = 'except_last', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]:
        """
        Returns the balance whose largest stage needs the fewest bytes, skip connections included.
        """
    def balance_by_time(self, partitions: typing.SupportsInt, chunks: typing.SupportsInt = 1, checkpoint: typing.Any = 'never', bandwidth: typing.SupportsFloat = 0.0, copies: bool = False) -> list[int]:
        """
        Returns the balance whose slowest stage is fastest.
        """
    def cut_bytes(self) -> list[int | None]:
        """
        Returns, for each layer, the bytes that a cut after it sends forward with each micro-batch: the activation, the skips that live across the cut, and the lent parameters. None where the model cannot be cut, and after the last layer.
        """
    def table(self, balance: collections.abc.Sequence[typing.SupportsInt] = []) -> str:
        """
        Returns a table as text: a row per layer with the bytes of a cut after it and, for a given balance, its cuts and the sums per stage.
        """
    def to_json(self) -> str:
        """
        Returns the profile as JSON text.
        """
    @property
    def device(self) -> str:
        """
        The device of the measurement.
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
        The skip connections.
        """
    @property
    def ties(self) -> list[TieProfile]:
        """
        The parameters that several layers share.
        """
    @property
    def workers(self) -> int:
        """
        Number of stages that ran at once during the measurement.
        """
class Scheduling:
    def __init__(self, schedule: str, stages_per_worker: typing.SupportsInt, placement: collections.abc.Sequence[typing.SupportsInt]) -> None:
        ...
class RunOptions:
    def __init__(self, chunks: typing.SupportsInt, checkpoint: typing.Any, bandwidth: typing.SupportsFloat, copies: bool, scheduling: Scheduling) -> None:
        ...
class Prediction:
    """
    The predicted cost of a training step.
    """
    def __str__(self) -> str:
        ...
    @property
    def balance(self) -> list[int]:
        """
        The balance of the pipeline.
        """
    @property
    def bubble(self) -> float:
        """
        Idle time as a share of the workers' total time, from 0 to 1.
        """
    @property
    def bytes(self) -> list[int]:
        """
        Peak bytes per worker, of parameters, gradients, optimizer state, buffers and activations.
        """
    @property
    def placement(self) -> list[int]:
        """
        The worker of each stage.
        """
    @property
    def seconds(self) -> float:
        """
        Seconds per step.
        """
    @property
    def stages(self) -> list[float]:
        """
        Seconds per stage for one micro-batch, from forward to backward.
        """
    @property
    def timeline(self) -> Timeline:
        """
        The simulated step. Its bytes do not include what workers hold between steps.
        """
class Candidate:
    """
    A way to run a model, with its predicted cost.
    """
    @property
    def balance(self) -> list[int]:
        """
        Number of layers of each stage.
        """
    @property
    def bubble(self) -> float:
        """
        Idle time as a share of the workers' total time, from 0 to 1.
        """
    @property
    def bytes(self) -> list[int]:
        """
        Peak bytes per worker.
        """
    @property
    def checkpoint(self) -> str:
        """
        The checkpoint mode.
        """
    @property
    def chunks(self) -> int:
        """
        Number of micro-batches per mini-batch.
        """
    @property
    def crossing(self) -> int:
        """
        Bytes that the forward of a mini-batch sends to other workers.
        """
    @property
    def fits(self) -> bool:
        """
        Whether every device stays within the memory limit.
        """
    @property
    def placed_by(self) -> str:
        """
        Names what places the stages, which is 'schedule', 'stages_per_worker', 'v', or 'placement' for another list.
        """
    @property
    def placement(self) -> list[int]:
        """
        The worker of each stage.
        """
    @property
    def reduction(self) -> float:
        """
        The part of the seconds after the last backward, until the replicas have summed all gradients.
        """
    @property
    def replicas(self) -> int:
        """
        Number of pipelines that share the mini-batch. The numbers of chunks and bytes are of one of them.
        """
    @property
    def schedule(self) -> str:
        """
        The schedule of step(); empty for forward and backward.
        """
    @property
    def seconds(self) -> float:
        """
        Seconds per step, the forward and backward of a mini-batch.
        """
class Suggestion:
    """
    Ways to run a model, best first.
    """
    def __str__(self) -> str:
        ...
    def profile_of(self, candidate: Candidate) -> Profile:
        """
        Returns the profile that a candidate was computed from.
        """
    @property
    def best(self) -> Candidate:
        """
        The first candidate. Raises RuntimeError, with the reason, if none fits.
        """
    @property
    def candidates(self) -> list[Candidate]:
        """
        One candidate per number of chunks, checkpoint mode and schedule. The fastest one that fits is first.
        """
    @property
    def fits(self) -> bool:
        """
        Whether any candidate fits.
        """
    @property
    def reason(self) -> str:
        """
        Why no candidate fits. Empty if one does.
        """
    @property
    def unpartitioned(self) -> Candidate | None:
        """
        The whole mini-batch on one device, without a pipeline; None if the model does not run that way.
        """
class Cluster:
    """
    Hosts of equal devices.
    """
    @staticmethod
    def from_json(text: str) -> Cluster:
        """
        Reads an object with 'hosts', 'devices_per_host', 'memory' of a device in bytes (0: no limit), and 'inside' and 'between' hosts, which are objects with a device's 'bandwidth' in bytes per second and the 'latency' in seconds. Raises ValueError, with the place and the fault.
        """
    @property
    def devices(self) -> int:
        """
        Number of devices.
        """
class ClusterPlan:
    """
    Ways to train a model on all devices of a cluster, best first.
    """
    def __str__(self) -> str:
        ...
    @property
    def best(self) -> Candidate:
        """
        The first candidate. Raises RuntimeError, with the reason, if none fits.
        """
    @property
    def candidates(self) -> list[Candidate]:
        """
        The best candidate for each number of replicas. The fastest one that fits is first.
        """
    @property
    def fits(self) -> bool:
        """
        Whether any candidate fits.
        """
    @property
    def reason(self) -> str:
        """
        Why no candidate fits. Empty if one does.
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
def arrange_workers(devices: collections.abc.Sequence[str], stages: typing.SupportsInt, schedule: str, stages_per_worker: typing.SupportsInt, placement: collections.abc.Sequence[typing.SupportsInt], ranks: Ranks | None) -> tuple[list[str], list[int], list[int]]:
    """
    Returns the device of each worker, the worker of each stage, and the rank of each worker.
    """
def begin_layer(stage: typing.Any, layer: typing.SupportsInt) -> None:
    ...
def borrowed(stage: typing.Any) -> list[tuple[typing.Any, typing.Any]]:
    ...
def check_balance(balance: collections.abc.Sequence[typing.SupportsInt], layers: typing.SupportsInt) -> None:
    ...
def check_checkpoint(name: typing.Any) -> str:
    ...
def check_chunks(chunks: typing.SupportsInt) -> None:
    ...
def check_loss(loss: typing.Any, output: typing.Any, target: typing.Any, options: StepOptions) -> tuple[float, float]:
    ...
def check_skips(declarations: list[typing.Any]) -> None:
    ...
def check_stages(stages: typing.SupportsInt, layers: typing.SupportsInt) -> None:
    ...
def draw_seed() -> int:
    ...
def fills_and_drains(schedule: str) -> bool:
    ...
def gather_snapshot(pipe: Pipeline, tensors: dict[str, typing.Any], training: str, whole: collections.abc.Sequence[tuple[str, str]], own: collections.abc.Sequence[str]) -> tuple[dict[str, typing.Any], str]:
    ...
def is_checkpointing() -> bool:
    """
    Returns whether the calling layer's forward will be recomputed. The graph of this forward is not kept.
    """
def is_recomputing() -> bool:
    """
    Returns whether the calling layer's forward is a recompute, which precedes the cell's backward.
    """
def part_of_snapshot(tensors: dict[str, typing.Any], training: str, whole: collections.abc.Sequence[tuple[str, str]], own: collections.abc.Sequence[str]) -> tuple[dict[str, typing.Any], str]:
    ...
def place_stages(schedule: str, stages: typing.SupportsInt, stages_per_worker: typing.SupportsInt, placement: collections.abc.Sequence[typing.SupportsInt]) -> list[int]:
    """
    Returns the worker of each stage.
    """
def plan_cluster(arg0: Cluster, arg1: collections.abc.Sequence[Profile], arg2: typing.SupportsInt, arg3: collections.abc.Sequence[typing.Any], arg4: str) -> ClusterPlan:
    ...
def pop(arg0: Namespace, arg1: str) -> typing.Any:
    ...
def predict(arg0: Profile, arg1: collections.abc.Sequence[typing.SupportsInt], arg2: RunOptions) -> Prediction:
    ...
def profile(arg0: list[typing.Any], arg1: typing.Any, arg2: ProfileOptions) -> Profile:
    ...
def read_snapshot(path: bytes) -> tuple[dict[str, typing.Any], str]:
    ...
def resnet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: bool) -> list[NativeLayer]:
    ...
def reuse_cpu_memory(on: bool = True) -> None:
    """
    Turns on, or off, a memory pool for CPU tensors of 64 KiB and more.
    
    Freed tensor memory is kept for reuse, so that after the first few steps, training does not allocate memory from the
    system. The pool belongs to the process and never shrinks.
    
    Call this at the start of the program, before other threads create tensors.
    
    Args:
        on: whether new tensors take their memory from the pool.
    """
def save_for_recompute(object: typing.Any) -> None:
    ...
def saved_for_recompute() -> typing.Any:
    ...
def schedule_names() -> list[str]:
    ...
def scope_generator(device: str) -> torch.Generator | None:
    ...
def stash(arg0: Namespace, arg1: str, arg2: typing.Any) -> None:
    ...
def suggest(arg0: list[typing.Any], arg1: typing.Any, arg2: collections.abc.Sequence[str], arg3: collections.abc.Sequence[typing.SupportsInt], arg4: collections.abc.Sequence[typing.Any], arg5: typing.SupportsInt, arg6: typing.SupportsFloat, arg7: Scheduling, arg8: ProfileOptions) -> Suggestion:
    ...
def unet(arg0: typing.SupportsInt, arg1: typing.SupportsInt, arg2: typing.SupportsInt, arg3: typing.SupportsInt, arg4: typing.SupportsInt, arg5: typing.SupportsFloat, arg6: typing.SupportsInt, arg7: str) -> list[NativeLayer]:
    ...
def v_placement(stages: typing.SupportsInt) -> list[int]:
    ...
def write_snapshot(path: bytes, tensors: dict[str, typing.Any], training: str) -> None:
    ...
def write_weights(path: bytes, tensors: dict[str, typing.Any]) -> None:
    """
    Writes tensors to a safetensors file.
    """
torch_version: str = '2.11.0'
