"""Runs functions in several processes, which are the ranks of a job."""

import multiprocessing
import pickle
import tempfile

import torch
import torch.distributed as dist

import gpipe

_context = multiprocessing.get_context("forkserver")
# What each rank would import: use_deterministic_algorithms() imports _inductor, a group of gloo imports device_mesh.
_context.set_forkserver_preload(["torch._inductor.config", "torch.distributed.device_mesh", "gpipe", "pytest"])


def join(rank, size, folder):
    """Makes this process a member of the default process group of torch.distributed."""
    store = dist.FileStore(f"{folder}/store", -1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _run(rank, size, folder, pipe, body, arguments):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    result = error = None
    try:
        join(rank, size, folder)
        with gpipe.Ranks(dist.group.WORLD, timeout=20, join_timeout=20) as ranks:
            result = body(ranks, *arguments)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    pipe.send_bytes(pickle.dumps((result, error)))  # send() would share the memory of tensors
    pipe.close()


def run_job(size, body, *arguments, seconds=120):
    """Calls ``body(ranks, *arguments)`` in new processes. Returns for each rank a tuple (result, error), where the error is
    the text of the exception that ended it, or None. A process that sends nothing has the error "no result"."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _context.Process(target=_run, args=(rank, size, folder, ends[rank][1], body, arguments))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sender in ends:
            sender.close()
        results = []
        for receiver, _ in ends:
            try:
                results.append(pickle.loads(receiver.recv_bytes()) if receiver.poll(seconds) else (None, "no result"))
            except EOFError:
                results.append((None, "no result"))
        for process in processes:
            process.kill()
            process.join()
        return results


def assert_equal_bits(ranks, alone):
    """Compares the results of all ranks with those of one process. Each has a list of tensors that all ranks have, and a dict
    of tensors that one rank has."""
    joined = {}
    for shared, own in ranks:
        assert all(torch.equal(a, b) for a, b in zip(shared, alone[0], strict=True))
        assert not joined.keys() & own.keys()
        joined |= own
    assert joined.keys() == alone[1].keys()
    assert all(torch.equal(joined[name], alone[1][name]) for name in joined)


def results_of(size, body, *arguments):
    """The results of a job in which no rank fails."""
    results = run_job(size, body, *arguments)
    errors = [error for _, error in results]
    assert errors == [None] * size, errors
    return [result for result, _ in results]
