"""JSON Schema of what each command prints with ``--json``. The same stands in docs/schema/, which `make docs` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec.json import schema_components

from fse_convert.report.inspection.records import InspectionRecord
from fse_convert.report.lists import CodesRecord, DoctorRecord, TargetsRecord
from fse_convert.report.records import ConversionRecord, Failure, ProofRecord, Record, RestorationRecord

RESPONSES: Mapping[str, type[Record]] = {
    "convert": ConversionRecord,
    "doctor": DoctorRecord,
    "explain": CodesRecord,
    "inspect": InspectionRecord,
    "restore": RestorationRecord,
    "targets": TargetsRecord,
    "verify": ProofRecord,
}
"""What each command prints."""


def schema(command: str) -> str:
    """Return the schema of what a command prints, or what it prints when it cannot answer, as JSON text."""
    either, definitions = schema_components([RESPONSES[command], Failure], ref_template="#/$defs/{name}")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"fse-convert {command} --json"}
    return json.dumps({**head, "anyOf": either, "$defs": definitions}, indent=2)
