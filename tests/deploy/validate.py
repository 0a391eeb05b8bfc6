"""Program: validates manifests against the schemas of Kubernetes, and against those of JobSet and KubeRay.

kubernetes-validate brings the schemas of Kubernetes. Of JobSet and KubeRay the fields that the manifests use are listed
here, and the parts that are Kubernetes' own (jobs, pods) are validated as such. Arguments: files.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.31"
"""Oldest version of Kubernetes that has all fields by default."""


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    return {
        "type": "object", "properties": properties, "required": required.split(), "additionalProperties": False,
    }  # fmt: skip


def several(items: dict[str, Any]) -> dict[str, Any]:
    """Schema of a list with one item at least."""
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NUMBER, FLAG, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
METADATA = fields("name", name=TEXT, labels=TEXTS, annotations=TEXTS)
GROUP = {"rayStartParams": TEXTS, "template": ANY}
WORKERS = fields("groupName template", groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER, maxReplicas=NUMBER, **GROUP)
OTHERS = {
    "jobset.x-k8s.io/v1alpha2/JobSet": fields(
        "replicatedJobs",
        network=fields("", enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
        failurePolicy=fields("", maxRestarts=NUMBER),
        replicatedJobs=several(fields("name template", name=TEXT, replicas=NUMBER, template=ANY)),
    ),
    "ray.io/v1/RayJob": fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            headGroupSpec=fields("template", **GROUP),
            workerGroupSpecs=several(WORKERS),
        ),
    ),
}
"""Schemas of the field ``spec``, by API version and kind."""


def own_parts(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Resources of Kubernetes that this one is, or holds."""
    spec = resource.get("spec", {})
    match resource["kind"]:
        case "JobSet":
            for job in spec["replicatedJobs"]:
                yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        case "RayJob":
            cluster = spec["rayClusterSpec"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        case _:
            yield resource


def validate(path: Path) -> int:
    """Validate a file; returns how many parts of Kubernetes it has."""
    parts = 0
    for resource in yaml.safe_load_all(path.read_text("utf-8")):
        schema = OTHERS.get(f"{resource['apiVersion']}/{resource['kind']}")
        if schema is not None:
            whole = fields("apiVersion kind metadata spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=schema)
            jsonschema.validate(resource, whole)
        for part in own_parts(resource):
            kubernetes_validate.validate(part, VERSION, strict=True)
            parts += 1
    return parts


if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            sys.stdout.write(f"{name}: {validate(Path(name))} valid\n")
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError, yaml.YAMLError) as error:
            sys.exit(f"{name}: {error}")
