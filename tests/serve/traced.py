"""A launched server whose spans stay in memory: when it ends, it logs them all as `spans`."""

from __future__ import annotations

import json
import sys
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from maskfx.serve.frontend import tracing
from tests.serve.launched import main

ENDPOINT = "http://127.0.0.1:9"  # nothing is sent there


def told(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    return {
        "name": span.name,
        "trace": f"{context.trace_id:032x}",
        "id": f"{context.span_id:016x}",
        "parent": None if parent is None else f"{parent.span_id:016x}",
        "began": span.start_time,
        "ended": span.end_time,
        "status": span.status.status_code.name,
        "events": [event.name for event in span.events],
        **dict(span.attributes or {}),
    }


if __name__ == "__main__":
    kept = InMemorySpanExporter()
    tracing.exporter_to = lambda endpoint: kept
    code = main()
    spans = [told(span) for span in kept.get_finished_spans()]
    print(json.dumps({"event": "spans", "spans": spans}), file=sys.stderr)
    sys.exit(code)
