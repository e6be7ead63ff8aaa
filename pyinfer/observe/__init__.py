"""What can be seen of a run. Observers go to `pyinfer.load(observers=[...])`; without one nothing is wrapped.

CallLog       a line per op through `logging`, and a count of each at the end
PhaseProfile  time by phase: qkv, attention, mlp, ...
ChromeTrace   a file that Perfetto opens
OpRecord      a fingerprint of what every op gave, for `compare`
"""

from ..backend.tracing import Call, Observer, Span
from .calls import CallLog
from .chrome import ChromeTrace
from .compare import OpRecord, compare
from .phases import PhaseProfile
from .plan import plan

__all__ = [
    "Call",
    "CallLog",
    "ChromeTrace",
    "Observer",
    "OpRecord",
    "PhaseProfile",
    "Span",
    "compare",
    "plan",
]
