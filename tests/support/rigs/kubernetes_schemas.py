"""Checks manifests by schemas: `python kubernetes_schemas.py CRDS VERSION... < manifests`.

By an interpreter that has kubernetes-validate, which brings the schemas of Kubernetes; CRDS is a
folder of custom resource definitions, which need not exist. Prints JSON for each resource: version,
CRD or "no schema", kind, and what is wrong with it, or null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-not-found]
import yaml

# Groups of which Kubernetes itself has no schema.
CUSTOM_GROUPS = ("jobset.x-k8s.io", "keda.sh", "monitoring.coreos.com")


def main() -> int:
    folder, *versions = sys.argv[1:]
    kinds = {
        kind: schema
        for path in Path(folder).glob("*.yaml")
        for kind, schema in crd(path)
    }
    for resource in filter(None, yaml.safe_load_all(sys.stdin)):
        kind = (resource["apiVersion"], resource["kind"])
        if kind in kinds:
            errors = kinds[kind].iter_errors(resource)
            messages = [error.message for error in errors]
            say("CRD", resource["kind"], "; ".join(messages) or None)
        elif resource["apiVersion"].partition("/")[0] in CUSTOM_GROUPS:
            say("no schema", resource["kind"], None)
        else:
            check(resource, versions)
        spec = resource.get("spec", {})
        for job in spec.get("replicatedJobs", []):
            whole = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "job"},
            }
            check(whole | job["template"], versions)
    return 0


def check(resource: dict[str, Any], versions: list[str]) -> None:
    """Prints what each version of Kubernetes says; unknown fields are wrong."""
    for version in versions:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            say(version, resource["kind"], str(error))
        else:
            say(version, resource["kind"], None)


def say(version: str, kind: str, wrong: str | None) -> None:
    print(json.dumps({"version": version, "kind": kind, "wrong": wrong}))


def crd(path: Path) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields name and validator of each version of a definition."""
    for table in filter(None, yaml.safe_load_all(path.read_text())):
        spec = table["spec"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            forbid_others(schema)
            # Every resource has the next three, and the API server checks them.
            for name in ("apiVersion", "kind", "metadata"):
                schema["properties"][name] = {}
            kind = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            yield kind, jsonschema.Draft202012Validator(schema)


def forbid_others(schema: Any) -> None:
    """Makes unknown fields wrong, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        for property_schema in schema:
            forbid_others(property_schema)
    if not isinstance(schema, dict):
        return
    if schema.pop("x-kubernetes-int-or-string", False):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if isinstance(schema.get("properties"), dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if not is_open and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for property_schema in schema["properties"].values():
            forbid_others(property_schema)
    for name in ("items", "additionalProperties"):
        forbid_others(schema.get(name))


if __name__ == "__main__":
    sys.exit(main())
