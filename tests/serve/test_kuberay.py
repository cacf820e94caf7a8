"""deploy/kuberay.yaml has fields that KubeRay's RayCluster has, and settings that the server has.

`SCHEMA` is written down from the types of `ray.io/v1`, with the fields of Kubernetes that the
manifest uses; an object may have no others.
"""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from maskfx.cli import main as cli
from maskfx.serve.config import ServeSettings
from maskfx.serve.sources import configure

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "deploy" / "kuberay.yaml"
CONSTRAINTS = ROOT / "constraints.txt"


def record(required: str = "", **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def many(each: dict[str, Any], least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": each, "minItems": least}


def mapping(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value}


TEXT: dict[str, Any] = {"type": "string"}
FLAG: dict[str, Any] = {"type": "boolean"}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
NAME: dict[str, Any] = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
PORT_NAME: dict[str, Any] = {"type": "string", "pattern": r"^[a-z0-9-]{1,15}$"}
PORT: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 65535}, PORT_NAME]}
QUANTITY: dict[str, Any] = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}
METADATA = record("", name=NAME, labels=mapping(TEXT), annotations=mapping(TEXT))

PROBE = record(
    "",
    httpGet=record("port", path=TEXT, port=PORT),
    tcpSocket=record("port", port=PORT),
    exec=record("command", command=many(TEXT, 1)),
    initialDelaySeconds=COUNT,
    periodSeconds=COUNT,
    timeoutSeconds=COUNT,
    failureThreshold=COUNT,
)
VARIABLE = record(
    "name",
    name={"type": "string", "pattern": r"^[A-Z][A-Z0-9_]*$"},
    value=TEXT,
    valueFrom=record("", secretKeyRef=record("name key", name=NAME, key=TEXT)),
)
CONTAINER = record(
    "name image resources",
    name=NAME,
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    env=many(VARIABLE),
    ports=many(record("containerPort", containerPort=PORT, name=PORT_NAME)),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=record("", requests=mapping(QUANTITY), limits=mapping(QUANTITY)),
    volumeMounts=many(record("name mountPath", name=NAME, mountPath=TEXT, readOnly=FLAG)),
)
VOLUME = record(
    "name",
    name=NAME,
    persistentVolumeClaim=record("claimName", claimName=NAME, readOnly=FLAG),
    emptyDir=record("", medium=TEXT, sizeLimit=QUANTITY),
)
POD = record(
    "spec",
    metadata=METADATA,
    spec=record(
        "containers",
        containers=many(CONTAINER, 1),
        volumes=many(VOLUME),
        terminationGracePeriodSeconds=COUNT,
        nodeSelector=mapping(TEXT),
        serviceAccountName=NAME,
    ),
)
CLUSTER = record(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record(
        "",
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        idleTimeoutSeconds=COUNT,
        image=TEXT,
        env=many(VARIABLE),
    ),
    headServiceAnnotations=mapping(TEXT),
    suspend=FLAG,
    headGroupSpec=record(
        "rayStartParams template",
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        enableIngress=FLAG,
        rayStartParams=mapping(TEXT),  # also numbers are texts
        template=POD,
    ),
    workerGroupSpecs=many(
        record(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            rayStartParams=mapping(TEXT),
            template=POD,
        )
    ),
)
CLAIM = record(
    "accessModes resources",
    accessModes=many({"enum": ["ReadOnlyMany", "ReadWriteMany", "ReadWriteOnce"]}, 1),
    storageClassName=NAME,
    resources=record("requests", requests=mapping(QUANTITY)),
)
SERVICE = record(
    "selector ports",
    selector=mapping(TEXT),
    ports=many(record("port", name=PORT_NAME, port=PORT, targetPort=PORT), 1),
)


def kind(version: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": name},
        metadata=METADATA,
        spec=spec,
    )


SCHEMA = {
    "RayCluster": kind("ray.io/v1", "RayCluster", CLUSTER),
    "PersistentVolumeClaim": kind("v1", "PersistentVolumeClaim", CLAIM),
    "Service": kind("v1", "Service", SERVICE),
}


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


@pytest.fixture
def cluster() -> dict[str, Any]:
    (found,) = [each["spec"] for each in objects() if each["kind"] == "RayCluster"]
    return dict(found)


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_every_object_has_known_fields_only() -> None:
    for each in objects():
        jsonschema.validate(each, SCHEMA[each["kind"]])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroup"), {}),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "maxReplica"), 1),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "imagePull"), "x"),
    ],
)
def test_the_schema_refuses_others(path: tuple[Any, ...], value: object) -> None:
    found = copy.deepcopy(next(each for each in objects() if each["kind"] == "RayCluster"))
    place = found
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, SCHEMA["RayCluster"])


def test_volumes_claims_and_ports_are_those_that_there_are(cluster: dict[str, Any]) -> None:
    claims = {each["metadata"]["name"] for each in objects() if "accessModes" in each["spec"]}
    for pod in pods(cluster):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        used = [
            v["persistentVolumeClaim"]["claimName"]
            for v in volumes.values()
            if len(v) == 2 and "persistentVolumeClaim" in v
        ]
        assert set(used) == claims
        ports = {port["name"] for port in container["ports"]}
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            (one,) = (probe[how] for how in ("httpGet", "tcpSocket") if how in probe)
            assert one["port"] in ports
    head = cluster["headGroupSpec"]["template"]
    (service,) = (each["spec"] for each in objects() if each["kind"] == "Service")
    assert service["selector"].items() <= head["metadata"]["labels"].items()
    ports = {port["name"] for port in head["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports


def started(cluster: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The server's command line in the head's container, and its plain variables."""
    (container,) = pods(cluster)[0]["containers"]
    (line,) = re.findall(r"^exec maskfx serve (.*)$", container["args"][0], re.M)
    plain = {each["name"]: each.get("value", "secret") for each in container["env"]}
    return shlex.split(line), plain


def test_the_head_serves_by_known_settings(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line, variables = started(cluster)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["serve", *line, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert 'executor = "ray"  # command line' in shown
    assert 'address = "auto"  # command line' in shown
    assert "link_port = 8765  # MASKFX_RAY__LINK_PORT" in shown


def test_numbers_that_belong_together_are_equal(cluster: dict[str, Any]) -> None:
    line, variables = started(cluster)
    settings = configure({"model": line[0], "executor": "ray"}, variables, None).settings
    assert isinstance(settings, ServeSettings)
    head, worker = pods(cluster)
    (group,) = cluster["workerGroupSpecs"]
    ports = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    assert (ports["http"], ports["link"]) == (settings.port, settings.ray.link_port)
    assert head["terminationGracePeriodSeconds"] > settings.shutdown_timeout
    requests = worker["containers"][0]["resources"]["requests"]
    assert float(requests["cpu"]) == settings.ray.cpus, "a node has room for one worker"
    assert requests["nvidia.com/gpu"] == "1"
    assert settings.device == "cuda"
    assert group["minReplicas"] == settings.workers
    assert group["maxReplicas"] == settings.ray.max_workers
    raylet = worker["containers"][0]["ports"][0]["containerPort"]
    assert group["rayStartParams"]["node-manager-port"] == str(raylet)
    mounts = {mount["mountPath"] for mount in worker["containers"][0]["volumeMounts"]}
    assert str(settings.cache_dir) in mounts
    assert any(line[0].startswith(f"{mount}/") for mount in mounts), "the model lies on a volume"
    pinned = re.findall(r"^ray==(.*)$", CONSTRAINTS.read_text(encoding="utf-8"), re.M)
    assert [cluster["rayVersion"]] == pinned


def test_no_service_is_named_like_the_servers_variables() -> None:
    kinds = ("Service", "RayCluster")  # KubeRay makes a service named after the cluster
    names = [each["metadata"]["name"] for each in objects() if each["kind"] in kinds]
    assert len(names) == 2
    assert not any(name.startswith("maskfx") for name in names)
