"""Messages between the leader and the agent of a training, over TLS: JSON objects, one a line.

The leader says `hello` (`agent_protocol.py`), lets the agent `warm` up, which starts a process that loads its libraries
and waits, sends the files of the attempt in pieces (`file`), and orders it to `train`; the agent says `ready`, or
`refused`. Then the agent asks to `renew` its lease every few seconds, and hands the process its order when that is
first `renewed`. The leader asks for `news` (progress lines from an offset, the exit code, the step of the newest
checkpoint), which waits until there are any; has the agent `hold` the files of a checkpoint or of the finished adapter,
and gets them by `piece`s; orders it to `cancel` and to `stop`. A `heartbeat` goes to the leader every second, who gives
a silent connection up and connects again. Files are sent as they are, sealed.

The lease: what is renewed counts from the moment at which the agent *asked*. The leader answers when the lease of the
job is extended in the database, and that one is longer. So whatever is late, or lost, the process has ended before
another attempt can begin.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tuneship.training.spec import DataKeys

ASK_EVERY_S = 5.0
# The time for which the agent may let the training process compute, from the moment at which it asked.
LEASE_S = 25.0
# The training process of an agent has ended so long after its lease was last renewed, whatever became of the agent.
#
# It is longer than the lease: the agent kills the process within seconds. A job's lease in the database is as long.
GONE_S = 30.0
# The kind of an agent, on its command line.
TRAIN = "train"
CHECKPOINT, ADAPTER = "checkpoint", "adapter"
# Folders of the agent.
INPUTS, CHECKPOINTS, ATTEMPT, SENT = "inputs", "checkpoints", "attempt", "sent"
# Folder of the inputs: the adapter of the model that is measured beside the job's own.
COMPARED = "compared"


@dataclass(frozen=True)
class TrainOrder:
    """The training that an agent is to run; the files that it names have been sent."""

    # Directory of the base model, the same on every node.
    base: str
    # Digest of its files (`base_digest.py`): another model under that path is refused.
    digest: str
    # Whether a process that cannot be isolated must not start; otherwise it is isolated as far as possible.
    isolated: bool
    # The `TrainingSpec` as JSON; of its paths only the names of the dataset files count.
    spec: str
    keys: DataKeys = field(repr=False)

    def to_frame(self) -> dict[str, Any]:
        """The order as a message."""
        return {"op": "train", **asdict(self)}

    @classmethod
    def from_frame(cls, frame: Mapping[str, Any]) -> Self:
        """Read the message. Raises `KeyError` and `TypeError`."""
        fields: dict[str, Any] = {**frame, "keys": DataKeys(**frame["keys"])}
        del fields["op"]
        return cls(**fields)
