"""One line of the log for each call of an op, and the number of calls of each at the end."""

from __future__ import annotations

import logging

from ..backend.tracing import Call, Observer, TracingBackend

TRACE = 5  # below logging.DEBUG
logging.addLevelName(TRACE, "TRACE")
log = logging.getLogger("pyinfer.ops")


def asked_for() -> bool:
    """Whether the logger pyinfer.ops has been set to TRACE."""
    return log.isEnabledFor(TRACE)


class CallLog(Observer):
    """Logs at level TRACE to the logger pyinfer.ops. Decoding is run op by op."""

    replays = False

    def attached(self, ops: TracingBackend) -> None:
        self.ops = ops

    def call(self, call: Call) -> None:
        if call.leaf:
            layer = "" if call.layer is None else f" layer {call.layer}"
            took = (call.end - call.start) / 1e3
            log.log(
                TRACE,
                "[%s] %s %s %s %.1f us %s%s",
                *(
                    self.ops.name.upper(),
                    call.label,
                    shapes(call),
                    call.dtype,
                    took,
                    call.phase or "load",
                    layer,
                ),
            )

    def close(self) -> None:
        for line in self.ops.report().splitlines():
            log.log(TRACE, "%s", line)


def shapes(call: Call) -> str:
    """What goes in and what comes out: "1x576 576x576 -> 1x576"."""
    *given, last = ["x".join(map(str, shape)) for shape in call.shapes] or ["()"]
    return f"{' '.join(given)} -> {last}" if given else f"-> {last}"
