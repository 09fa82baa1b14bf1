"""The event files of earlier runs, which TensorBoard shows together with those of the current one."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from common.files import writing
from common.outputs import event_files


def cut_event_files(folder: Path, keeps: Callable[[str, int], bool]) -> None:
    """Cuts the folder's event files before the first record that is not whole or that `keeps` refuses, by its tag and step.
    Removes files that keep no record."""
    for path in event_files(folder):
        data = path.read_bytes()
        kept = 0
        for event, end in _events(data):
            tags = [value.tag for value in event.summary.value]
            if not tags:
                continue  # the version
            if not all(keeps(tag, event.step) for tag in tags):
                break
            kept = end
        with writing(path):
            if kept == 0:
                path.unlink()
            elif kept < len(data):
                os.truncate(path, kept)


def _events(data: bytes) -> Iterator[tuple[Event, int]]:
    """The whole events of a file, each with the position behind it. A record has a length and two checksums of 4 bytes."""
    end = 0
    while end + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        begin, end = end + 12, end + 16 + length
        if end > len(data):
            return
        try:
            yield Event.FromString(data[begin : end - 4]), end
        except DecodeError:
            return
