"""Skip connections: one layer stashes a tensor and a later layer pops it, in the same stage or in another.

    @skippable(stash=["features"])
    class Encode(nn.Module):
        def forward(self, x):
            stash("features", x)
            return x

    @skippable(pop=["features"])
    class Decode(nn.Module):
        def forward(self, x):
            return x + pop("features")

In a pipeline, the tensor goes directly from the stage that stashes to the stage that pops. In a plain
``nn.Sequential``, the layers pass it on the calling thread. Tensors of any dtype may be stashed, and ``None``.

A ``forward`` may also be a generator that yields the results of ``stash`` and ``pop``, as in torchgpipe:
``yield stash("features", x)``, ``features = yield pop("features")``.
"""

from gpipe.skip.commands import pop, stash
from gpipe.skip.layer import Skippable, skippable, verify_skippables
from gpipe.skip.namespace import Namespace

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
