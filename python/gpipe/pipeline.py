"""The container: a sequential model, cut into stages that run in parallel."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from gpipe import _C, checks
from gpipe.batchnorm import one_mini_batch
from gpipe.caller import outside_checkpoints, refuse_sharding, refuse_tracing
from gpipe.checks import BalanceError, Checkpoints
from gpipe.core import StagedModel
from gpipe.exported.conversion import input_of, to_sequential
from gpipe.exported.exporter import mode
from gpipe.loss_state import hold_state
from gpipe.losses import call_loss, check_scale, loss_tensor, native_loss, trains
from gpipe.partition import Partition, verify_module
from gpipe.planning import Plan, choose_plan, read_plan
from gpipe.randomness import without_turn
from gpipe.ranks import Ranks, ranks_of
from gpipe.report import Report
from gpipe.skip import Skippable
from gpipe.structure import take_apart
from gpipe.team import Team
from gpipe.weights import Values, Weights
from gpipe.wrapper import ConvertedSequence, batch_first, naming_dimensions

_Result = TypeVar("_Result")

__all__ = ["SCHEDULES", "BalanceError", "GPipe", "Partition"]

SCHEDULES: tuple[str, ...] = tuple(name for name, _, _ in _C.schedule_rules())
"""The names of the schedules of :meth:`GPipe.step`."""


class GPipe(StagedModel):
    """Trains a model over several devices.

        pipe = gpipe.GPipe.from_module(model, input)  # any module, cut where it is fastest
        loss = pipe.step(input, target, criterion)  # a forward and its backward, which fills .grad
        optimizer.step()

    The constructor takes a ``nn.Sequential``: ``gpipe.GPipe(model, balance=[2, 2], chunks=8)``. It cuts the model into
    stages by a balance, and places them on workers, each with a thread and a device. A mini-batch runs through them as
    micro-batches (GPipe, arXiv:1811.06965).

    It computes what the unpartitioned model does, micro-batch by micro-batch. Losses, optimizers, hooks, autocast,
    ``torch.autograd.grad`` and ``DistributedDataParallel`` around it work as usual; ``create_graph`` is refused. The
    pipeline has the model's own children, moved to their devices, so names, state and modes are the model's; ``to()``
    changes their dtype only. Any thread except the pipeline's workers may call it; calls take turns.

    A parameter of several stages is on the device of the first one, which lends it to the others; no layer may write to
    it. Over ranks, only the first one's rank lists it in ``parameters()``. Other ranks' tensors move to the ``meta``
    device, so a model serves one pipeline.

    Args:
        module: the model. Between stages, and as the result, pass tensors, alone or in tuples, named tuples, lists and
            dicts, which may hold ``None``.
        balance: the number of layers of each stage; see :mod:`gpipe.balance`.
        devices: one per worker, which may repeat. Surplus devices are ignored if each worker has one stage. Default: the
            GPUs, or the CPU for each worker.
        chunks: the number of micro-batches that a mini-batch is cut into along dimension 0, as equal as can be
            (``torch.tensor_split``). Default: 1, with a warning. A model that trains a batch norm gets fewer where one would
            have a single sample.
        checkpoint: which micro-batches recompute their forward in training mode instead of storing its graph:
            ``'always'``, ``'except_last'`` or ``'never'``; a number, for so many of those that a stage has in flight; or a
            list of these, one per stage. A stage recomputes as a whole. Stages that follow each other on a worker run as
            one, so ``placement=[0, 0, 1, 1]`` with ``checkpoint=["never", "always", "never", 2]`` recomputes a part of each
            worker's layers.
        deferred_batch_norm: whether batch norm and instance norm update their running statistics once per mini-batch.
        keep_memory: whether the process keeps the memory of freed CPU tensors for others of the same size while the
            pipeline lives, at most 1.25 times what was in use at once.
        schedule: the order of actions in :meth:`step`: a name in :data:`gpipe.SCHEDULES`; or lists, a line per worker, such
            as ``0F0 0F1 0B0 0B1``: stage, kind, micro-batch (for fewer micro-batches, gpipe makes lists); or
            ``'@'`` and the path of a file with them, which must stay; or ``'auto'``: the first step measures, and later ones
            have the schedule that is predicted to be the fastest, with the same bits. GPUs get none that needs more memory than
            ``'1f1b'``, or for several stages per worker than ``'interleaved_1f1b'``. Measures best with at least four
            micro-batches.
        placement: the worker of each stage; or ``'v'``, where stages ``s`` and ``n - 1 - s`` share one; or ``'looped'``, one
            per stage, and for interleaved schedules and ``'auto'`` one per given device: stage ``s`` of ``p`` workers is on
            worker ``s % p``. Lists, and a schedule that needs a V, have their own placement.
        group: the processes that run the pipeline together: :class:`gpipe.Ranks`, or a process group of torch.distributed.
            Each has an equal share of the workers, in order, with their ``devices``, and keeps only its layers. All make
            the same pipeline and calls. Default: this process has all workers.
        weights: of a model on the ``meta`` device: a ``.safetensors`` file, a folder of them, maybe with an index of Hugging
            Face, a file of ``torch.save``, or a function from a name in ``state_dict()`` to the tensor. Each rank reads the
            tensors of its own layers only. Without it, modules draw values.
        init: of a model on the ``meta`` device: ``init(module)`` gives values to the tensors of a module itself that
            ``weights`` do not have, such as ``model._init_weights``. Default: ``module.reset_parameters()``.

    Raises:
        TypeError: if ``module`` is not a plain ``nn.Sequential``, its skips do not match, or an argument has a wrong type.
        ValueError: if ``balance`` does not cut the model, an option is out of range, a layer stands in two places,
            ``module`` itself has hooks, parameters or buffers, a parameter is not initialized, or stages on different
            devices share a parameter through one module.
        IndexError: for fewer devices than workers, or a device that this process does not have.
        RuntimeError: over ranks, if a rank does not come, has failed, or makes another pipeline.

    Attributes:
        balance, chunks, checkpoint: as given; the last two may be assigned.
        devices: the device of each worker; the CPU for those of other ranks.
        placement: the worker of each stage.
        ranks: the processes that run the pipeline together; ``None`` if this one has all workers.
        module: the model, which is whole in one process. Of a converted sequence, its model.
        partitions: the stages, each a :class:`gpipe.pipeline.Partition`; no children. Those of other ranks are empty.
    """

    deferred_batch_norm: bool
    keep_memory: bool
    _warned: bool
    _timeline: _C.Timeline | None

    @checks.checks_arguments
    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int | None = None,
        checkpoint: Checkpoints = "except_last",
        deferred_batch_norm: bool = False,
        keep_memory: bool = True,
        schedule: str = "gpipe",
        placement: Iterable[int] | str = "looped",
        group: ProcessGroup | Ranks | None = None,
        weights: Weights | None = None,
        init: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Cuts a model into stages; see the class."""
        verify_module(module)
        cut = checks.check_balance(balance, len(module))
        if chunks is None and len(cut) > 1:
            warnings.warn(
                "a pipeline with one micro-batch runs one stage at a time; give chunks, such as chunks=8, to run them "
                "together, or chunks=1 if you want that",
                stacklevel=3,
            )
        ranks = ranks_of(group)
        native_ranks = None if ranks is None else ranks._core
        workers = checks.arrange_workers(devices, len(cut), schedule, placement, native_ranks)
        super().__init__(module, cut, workers, schedule, deferred_batch_norm, keep_memory, ranks, Values(weights, init))
        self.chunks, self.checkpoint = chunks or 1, checkpoint
        self.__dict__.update(deferred_batch_norm=deferred_batch_norm, keep_memory=keep_memory, _warned=False, _timeline=None)

    @classmethod
    @checks.checks_arguments
    def from_module(
        cls,
        module: nn.Module,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        opaque: Iterable[type[nn.Module]] = (),
        native: bool = False,
        batch_dim: int = 0,
        stages: int | None = None,
        balance: Iterable[int] | None = None,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int | None = None,
        checkpoint: Checkpoints | None = None,
        schedule: str | None = None,
        placement: Iterable[int] | str | None = None,
        deferred_batch_norm: bool = False,
        keep_memory: bool = True,
        group: ProcessGroup | Ranks | None = None,
        weights: Weights | None = None,
        init: Callable[[nn.Module], object] | None = None,
        memory: checks.Memory | None = None,
        plan: str | PathLike[str] | None = None,
        seconds: float = 5.0,
    ) -> GPipe:
        """Makes a pipeline of any module: converts it with :func:`gpipe.to_sequential`, unless it is a ``nn.Sequential`` that
        the constructor takes, with enough layers. Measures the layers for about ``seconds``, and chooses the fastest cut,
        schedule, placement, number of micro-batches and checkpoint mode that fit the devices' memory, except what is given.
        Measures nothing if all but the placement is given. Over ranks, rank 0 measures and chooses.

            pipe = gpipe.GPipe.from_module(torchvision.models.resnet50(), images)
            pipe = gpipe.GPipe.from_module(torchvision.models.resnet50(), images, memory="300MiB")

        The number of micro-batches changes the results of batch norm. For a model that has it, the default is two per
        worker. Layers of a model on the ``meta`` device are measured one at a time, each rank a share of them, with random values.

        Args:
            args, kwargs: a mini-batch, as arguments of the module. ``args`` is a tuple, or the only argument.
            opaque, native, batch_dim: see :func:`gpipe.to_sequential`.
            stages: the number of stages. Default: one per worker, or two, whichever is faster; then a warning tells if plain
                PyTorch is predicted to be faster.
            balance: the number of layers of each stage, instead of ``stages``.
            devices: one per worker. Default: the GPUs, or two CPU workers; with ``stages`` or a ``balance``, one per stage;
                over ranks, one per rank. See the constructor for the other arguments.
            memory: the most bytes on each device, as for :func:`gpipe.plan`; what does not fit otherwise is recomputed.
                Default: what is free on GPUs. Not used if nothing is left to choose.
            plan: a file that :meth:`gpipe.balance.Plan.save` wrote, instead of measuring.

        Raises what :func:`gpipe.to_sequential`, :func:`gpipe.plan` and the constructor raise.
        """
        if kwargs is not None and not isinstance(kwargs, Mapping):
            what = f"kwargs must be a dict of the module's arguments, but is {checks.shown(kwargs)}"
            raise TypeError(f"{what}; give stages by name, stages=2")
        if balance is not None and stages is not None:
            raise ValueError("balance and stages exclude each other: a balance has a number per stage; leave stages out")
        args = args if isinstance(args, tuple) else (args,)
        balance = None if balance is None else checks.check_list(balance, "balance", "numbers of layers")
        model = _as_layers(module, args, kwargs or {}, opaque, native, batch_dim, max(2, stages or len(balance or ())))
        ranks = ranks_of(group)
        placed = None if devices is None else checks.check_devices(devices)
        cut = None if balance is None else checks.check_balance(balance, len(model))
        chosen: dict[str, Any] = {"balance": cut, "chunks": chunks, "checkpoint": checkpoint, "schedule": schedule}
        given = chosen | {"stages": stages, "placement": placement}
        if plan is not None:
            if any(each is not None for each in (memory, *given.values())):
                raise ValueError("a plan says how the pipeline runs; leave out stages, balance, chunks and the like")
            chosen = read_plan(plan)
        elif None in chosen.values():
            batch = args[0] if model is module else input_of(args, kwargs or {})
            chosen = choose_plan(model, batch, given, placed, memory, ranks, seconds)
        else:
            chosen["placement"] = "looped" if placement is None else placement
        chosen |= {"deferred_batch_norm": deferred_batch_norm, "keep_memory": keep_memory}
        pipe = cls(model, devices=placed, group=ranks, weights=weights, init=init, **chosen)
        pipe._warned = schedule is None  # forward() need not have what the caller did not ask for
        return pipe

    @property
    def plan(self) -> Plan:
        """How the pipeline runs its model: ``GPipe(model, **pipe.plan)``, or ``from_module(module, input, **pipe.plan)``,
        makes another one that does. It has only numbers, texts and lists, and a snapshot keeps it. Of what
        :meth:`from_module` chooses, only the number of micro-batches changes bits of the results on CPU."""
        return {
            "balance": list(self.balance),
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "schedule": self.schedule,
            "placement": list(self.placement),
            "deferred_batch_norm": self.deferred_batch_norm,
            "keep_memory": self.keep_memory,
        }

    @property
    def team(self) -> Team:
        """The calls that the ranks make together, such as ``pipe.team.largest(number)``."""
        return Team(self)

    @property
    def schedule(self) -> str:
        """The schedule of :meth:`step`, as it was given. ``'auto'`` becomes the name or the lists that the first step chooses."""
        return self._present_schedule()

    def extra_repr(self) -> str:
        devices = ", ".join(map(str, self.devices))
        text = f"balance={self.balance}, devices=[{devices}], chunks={self.chunks}, checkpoint={self.checkpoint!r}"
        text += f", schedule={_shown(self.schedule)!r}"
        if self.placement != list(range(len(self.balance))):
            text += f", placement={self.placement}"
        return f"{text}, deferred_batch_norm=True" if self.deferred_batch_norm else text

    # Training.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on one mini-batch: tensors in any structure, whose dimension 0 is the batch, of the same size in
        all. A converted model takes its module's arguments, except those without tensors. Returns the output of the last
        layer for the whole mini-batch, on the last stage's device; on other ranks as :class:`Ranks` says. Warns once if it
        trains with a ``schedule`` that only :meth:`step` runs. An exception of a layer gets a note with its place.

        Raises:
            TypeError: if the input, or the output of a stage, holds anything but tensors and ``None``.
            ValueError: if an input has no dimensions, or if the inputs have unequal batch sizes.
            RuntimeError: if dimension 0 of an output is not the batch.
            NotImplementedError: under tracing, ``FakeTensorMode``, ``torch.func`` and forward-mode differentiation.
        """
        with self.team.refusing():
            input = self._one_input(args, kwargs)
            refuse_tracing()
            refuse_sharding(self, self.partitions, "forward")
            if not self.balance:
                take_apart(input)
                return input
            input = self._entering(input)
            self._warn_of_schedule()
            checkpoint = self.checkpoint if self.training else "never"
            pipeline = self._pipeline()
        with one_mini_batch(self._norms), without_turn(), outside_checkpoints(), naming_dimensions(self._batch_dim):
            return self._leaving(pipeline.forward(input, self.chunks, checkpoint, self.training))

    def _one_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the input of the first layer. That of a converted model takes all arguments in one."""
        if len(args) == 1 and not kwargs:
            return args[0]
        if isinstance(self._sequence, ConvertedSequence):
            named = {name: each for name, each in kwargs.items() if each is not None}
            return args if not named else (args, named) if args else named
        if not args and kwargs.keys() == {"input"}:
            return kwargs["input"]
        given = f"{len(args) + len(kwargs)} arguments"
        raise TypeError(f"the first layer takes one input, but got {given}; call pipe((a, b)), or pipe({{'name': a}})")

    def evaluate(self, input: Any, target: Any, loss: Callable[[Any, Any], _Result]) -> _Result:
        """Returns ``loss(output, target)`` of a mini-batch in evaluation mode, without gradients, on the output and the target
        of all samples. ``loss`` is any function: a loss, or one that returns scores. The target may be on any device. Over
        ranks, that of the last stage calls it, and the others of its replica get the result: tensors and plain Python types.
        Restores the modules' modes."""
        with self.team.refusing():
            checks.check_function(loss, "loss", "output and target")
        with mode(self.module, False), torch.no_grad():
            output = self(input)
            device = next((tensor.device for tensor in take_apart(output)[0]), torch.device("cpu"))
            return self.team.of_last_stage(
                lambda: call_loss(loss, output, tree_map_only(Tensor, lambda tensor: tensor.to(device), target))
            )

    def _warn_of_schedule(self) -> None:
        if self._warned or not self.training or not torch.is_grad_enabled() or _C.fills_and_drains(self.schedule):
            return
        self._warned = True
        message = "forward() and backward() always run all forwards, then all backwards; only step() has schedule="
        message += f"{_shown(self.schedule)!r}; train with step(), or call eval() before you evaluate"
        warnings.warn(message, stacklevel=5)

    @overload
    def step(
        self,
        input: Any,
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        scale: float | GradScaler = 1.0,
        return_output: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def step(
        self,
        input: Any,
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        scale: float | GradScaler = 1.0,
        return_output: Literal[True],
    ) -> tuple[Tensor, Any]: ...

    def step(
        self,
        input: Any,
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        scale: float | GradScaler = 1.0,
        return_output: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """Trains on one mini-batch, in the order of the schedule. Adds the gradients to ``.grad`` of the parameters and of
        inputs that require grad. Hooks of parameters and of the input run once, of layers per micro-batch, of the pipeline
        itself in :meth:`forward` only. Backwards do not use autocast. Returns the detached loss of the mini-batch: the
        backward has run, so do not call ``loss.backward()``. With ``return_output``, returns a tuple of it and the detached
        output. After an error, gradients of earlier steps may hold a part of this one.

            optimizer.zero_grad()
            loss = pipe.step(input, target, nn.functional.cross_entropy)
            optimizer.step()

        Args:
            input: as for :meth:`forward`.
            target: tensors in any structure, on any device. It is cut along dimension 0 as the input is.
            loss: ``loss(output, target)`` returns the loss of one micro-batch, a floating-point scalar that decomposes over
                samples; or a :class:`gpipe.Loss`, which has options. A mean is weighted by samples, one of torch by its
                targets that are not ignored. The first step with a loss compares it with the whole mini-batch; see
                :class:`gpipe.Loss`. Called on the last stage's worker. Draw its random numbers with torch. Tensors of its
                own that require grad get gradients, but not with replicas.
            scale: multiplies all gradients, but not the returned loss. A ``torch.amp.GradScaler`` gives its scale: call its
                ``step(optimizer)`` and ``update()`` afterwards, over ranks on each one that has parameters. If a gradient
                of any rank is not finite, all ranks' become infinite, so that all skip the optimizer's step.
            return_output: whether to return the model's output too, as the loss leaves it.

        Raises:
            RuntimeError: in evaluation mode or without grad mode (use :meth:`evaluate`); inside
                ``DistributedDataParallel`` (use replicas, or :meth:`compute_loss`).
            ValueError: for a target with another number of samples or that requires grad, a loss that is not a scalar or
                differs from that of the whole mini-batch, a wrong count, or invalid arguments.
            TypeError, NotImplementedError: as :meth:`forward`.

        An exception of a layer or of ``loss`` (named as layer ``'loss'``) is raised unchanged, with a note. No gradient
        has been added then, unless a hook raised the exception.
        """
        result = self._run_step("step", input, target, loss, scale, return_output)
        return result if return_output else result[0]

    def compute_loss(
        self,
        input: Any,
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        *,
        scale: float | GradScaler = 1.0,
    ) -> Tensor:
        """Computes the loss and all gradients as :meth:`step`, with its arguments. Adds nothing to ``.grad``, but returns the
        loss with its graph: a backward of it hands out the gradients, times its incoming gradient. For a module that returns
        the loss, such as one inside ``DistributedDataParallel``, and for ``torch.autograd.grad``."""
        result: Tensor = self._run_step("compute_loss", input, target, loss, scale, False)[0]
        return result

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips the gradients of the whole model as ``torch.nn.utils.clip_grad_norm_`` does in one process, with the same
        bits. Over ranks, all call it, and ``max_norm`` and ``norm_type`` are positive. Returns the total norm before
        clipping. With ``error_if_nonfinite``, raises RuntimeError, and changes nothing, if it is not finite."""
        with self.team.refusing():
            checked = checks.check_number(max_norm, "max_norm"), checks.check_number(norm_type, "norm_type")
            if self.ranks is None:
                return torch.nn.utils.clip_grad_norm_(self.parameters(), *checked, error_if_nonfinite)
            pipeline = self._pipeline()
        return pipeline.clip_grad_norm_(*checked, error_if_nonfinite)

    def _run_step(
        self, method: str, input: Any, target: Any, loss: Any, scale: object, return_output: object
    ) -> tuple[Any, Any]:
        with self.team.refusing():
            refuse_tracing()
            refuse_sharding(self, self.partitions, method)
            if not self.balance:
                raise ValueError("the model has no layers, so it cannot be trained")
            input, target = self._entering(input), batch_first(target, self._batch_dim)
            pipeline = self._pipeline()
            chosen = self._losses.loss_of(loss, self.chunks)
            function = chosen.function
            scales = self.ranks is not None and isinstance(scale, GradScaler) and scale.is_enabled()
            if scales and method != "step":
                raise TypeError(f"over ranks, give a GradScaler to step(), but {method}() got it: backward() comes later")
            if self.ranks is not None and self.ranks.replicas > 1 and trains(function):
                raise ValueError(
                    "the loss has parameters, whose gradients replicas do not sum; make it the last layer of the model, and "
                    "pass a loss without parameters"
                )
            factor = check_scale(scale, self.devices[self.placement[-1]])
        if scales:
            factor = self.team.common_scale(factor)
        with self.team.refusing():
            options = chosen.options(factor, self.chunks, self.checkpoint, checks.check_flag(return_output, "return_output"))
            is_plain = not isinstance(self._sequence, ConvertedSequence) or self._sequence.is_plain
            native = native_loss(function) if is_plain else None
            if native is not None and self.ranks is None and not trains(function):
                tensors = chain(self.partitions.parameters(), tree_leaves(input))
                if not any(isinstance(each, Tensor) and each.requires_grad for each in tensors):
                    raise RuntimeError("no parameter and no input requires grad: unfreeze a parameter, or use evaluate()")
        with one_mini_batch(self._norms), without_turn(), outside_checkpoints(), naming_dimensions(self._batch_dim):
            keeps_graph = method == "compute_loss"
            hold = partial(hold_state, function, chain(self.modules(), self.parameters(), self.buffers()))

            def called(output: Any, target: Any) -> Tensor:
                return loss_tensor(function, self._leaving(output), batch_first(target, self._batch_dim))

            arguments = called, native, chosen._record, hold, options, self.training, keeps_graph
            result = pipeline.train(input, target, *arguments)
        if scales:
            self.team.spread_overflow()
        return result[0], result[1] if result[1] is None else self._leaving(result[1])

    def trace(self, timeline: _C.Timeline | None) -> None:
        """Appends the actions of each later mini-batch to a timeline; ``None`` ends the recording. On GPUs, calls then wait
        for the devices. No bytes are counted under a PyTorch profiler. Read the timeline while no call runs."""
        if timeline is not None:
            advice = "write timeline.to_chrome_json() to a file after the calls"
            checks.check_is(timeline, "timeline", _C.Timeline, "a gpipe.Timeline or None", advice)
        self._pipeline().trace(timeline)
        self.__dict__["_timeline"] = timeline or self._timeline

    def report(self, memory: checks.Memory | None = None) -> Report:
        """Returns what the steps of the last :meth:`trace` did: where the time went, and what each worker waited for. Over
        ranks, all call it, and those except rank 0 get an empty one. With the ``memory`` of each device, as for
        :meth:`from_module`, its page shows what is left besides parameters, buffers and Adam's state."""
        with self.team.refusing():
            if self._timeline is None:
                raise RuntimeError("nothing has been traced: call pipe.trace(gpipe.Timeline()) before the steps")
        room = self._room(memory)
        return Report(self.team.gather_timeline(self._timeline).to_json_lines(), room)

    def _room(self, memory: checks.Memory | None) -> list[int]:
        """Returns the bytes of each worker's device that remain besides parameters, buffers and Adam's state. All ranks call
        it."""
        with self.team.refusing():
            limits = [] if memory is None else checks.check_memory(memory)
            held = [0] * len(set(self.placement))
            if len(limits) not in (0, 1, len(held)):
                raise ValueError(f"memory has {len(limits)} sizes, but there are {len(held)} workers")
        for worker in range(len(held)):
            own = nn.ModuleList(stage for at, stage in zip(self.placement, self.partitions, strict=True) if at == worker)
            held[worker] += sum(each.nbytes * (3 if each.requires_grad else 1) for each in own.parameters() if not each.is_meta)
            held[worker] += sum(each.nbytes for each in own.buffers() if not each.is_meta)
        all_held = self.team.gather(bytes(json.dumps(held), "ascii"), "bytes of models") if limits else []
        most = [max(of_ranks) for of_ranks in zip(*map(json.loads, all_held), strict=True)]
        return [max(0, limit - each) for limit, each in zip(limits * (len(most) // max(1, len(limits))), most, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_timeline": None}


def _shown(schedule: str) -> str:
    return "lists" if _C.has_lists(schedule) and not schedule.startswith("@") else schedule


def _as_layers(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    opaque: Iterable[type[nn.Module]],
    native: bool,
    batch_dim: int,
    stages: int,
) -> nn.Sequential:
    """Returns a sequence that a pipeline of so many stages takes as it is, or that a module was converted to."""
    opaque = tuple(opaque)
    if type(module) is nn.Sequential and len(args) == 1 and not (kwargs or opaque or native or batch_dim):
        if any(isinstance(each, Skippable) for each in module.modules()):  # which cannot be converted
            return module
        with suppress(TypeError, ValueError):
            verify_module(module)
            if len(module) >= stages:
                return module
    model = to_sequential(module, *args, opaque=opaque, native=native, batch_dim=batch_dim, **kwargs)
    if isinstance(model, ConvertedSequence) and len(model) < stages and model.refused:
        text = f"the model has {len(model)} layers, too few for {stages} stages, because some stay whole:"
        raise ValueError("\n".join((text, *model.refused.values())))
    if not native and len(model) > 100:
        advice = "native=True runs most of them without Python, which is faster if they are small"
        warnings.warn(f"the model has {len(model)} layers; {advice}", stacklevel=4)
    return model
