"""The KubeRay manifest: that it has the shape of a RayJob, and asks for nodes that it describes."""

import copy
import json

import jsonschema
import pytest
from omegaconf import OmegaConf
from test_config import CONF

from rtpo_ray.config import load_config


def fields(required=(), **known):
    """An object that has these fields and no others."""
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


TEXT, NUMBER, YES_OR_NO, MANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9.]+(m|[EPTGMk]i?)?$"}}
CONTAINER = fields(("name", "image"), name=TEXT, image=TEXT, env={"type": "array"}, resources=fields(limits=QUANTITIES, requests=QUANTITIES),
                   volumeMounts={"type": "array", "items": fields(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=YES_OR_NO)})
VOLUME = fields(("name",), name=TEXT, persistentVolumeClaim=fields(("claimName",), claimName=TEXT, readOnly=YES_OR_NO), emptyDir=MANY)
TEMPLATE = fields(("spec",), metadata=MANY, spec=fields(("containers",), containers={"type": "array", "items": CONTAINER, "minItems": 1},
                                                        volumes={"type": "array", "items": VOLUME}))
# Of the API ray.io/v1 (KubeRay, ray-operator/apis/ray/v1): the fields of a RayJob down to its pods, and of a pod those in use here.
HEAD = fields(("rayStartParams", "template"), serviceType=TEXT, headService=MANY, enableIngress=YES_OR_NO, rayStartParams=TEXTS, template=TEMPLATE)
GROUP = fields(("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"), groupName=TEXT, replicas=NUMBER, minReplicas=NUMBER,
               maxReplicas=NUMBER, numOfHosts=NUMBER, rayStartParams=TEXTS, template=TEMPLATE, scaleStrategy=MANY)
AUTOSCALER = fields(resources=MANY, image=TEXT, imagePullPolicy=TEXT, env={"type": "array"}, envFrom={"type": "array"}, idleTimeoutSeconds=NUMBER,
                    volumeMounts={"type": "array"}, securityContext=MANY, upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]})
CLUSTER = fields(("headGroupSpec",), headGroupSpec=HEAD, workerGroupSpecs={"type": "array", "items": GROUP}, rayVersion=TEXT,
                 enableInTreeAutoscaling=YES_OR_NO, autoscalerOptions=AUTOSCALER, headServiceAnnotations=TEXTS, suspend=YES_OR_NO)
JOB = fields(activeDeadlineSeconds=NUMBER, backoffLimit=NUMBER, rayClusterSpec=CLUSTER, submitterPodTemplate=TEMPLATE, metadata=TEXTS,
             clusterSelector=TEXTS, submitterConfig=MANY, managedBy=TEXT, deletionStrategy=MANY, entrypoint=TEXT, runtimeEnvYAML=TEXT, jobId=TEXT,
             submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]}, entrypointResources=TEXT, entrypointNumCpus={"type": "number"},
             entrypointNumGpus={"type": "number"}, ttlSecondsAfterFinished=NUMBER, shutdownAfterJobFinishes=YES_OR_NO, suspend=YES_OR_NO)
SCHEMA = fields(("apiVersion", "kind", "metadata", "spec"), apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"}, metadata=MANY, spec=JOB)


@pytest.fixture
def job():
    return OmegaConf.to_container(OmegaConf.load(CONF / "cluster" / "kuberay.yaml"))


def test_it_has_the_shape_of_a_rayjob(job):
    jsonschema.validate(job, SCHEMA)
    assert {mount["name"] for group in (job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"])
            for container in group["template"]["spec"]["containers"] for mount in container["volumeMounts"]} == {"runs"}


@pytest.mark.parametrize("path", [
    ("spec", "entryPoint"), ("spec", "rayClusterSpec", "enableAutoscaling"), ("spec", "rayClusterSpec", "workerGroupSpecs", 0, "resources"),
    ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "volumeMount")])
def test_a_misspelt_field_would_be_seen(job, path):
    broken = inner = copy.deepcopy(job)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "x"
    with pytest.raises(jsonschema.ValidationError, match="Additional properties are not allowed"):
        jsonschema.validate(broken, SCHEMA)


def test_it_asks_for_nodes_that_it_describes(job):
    spec, words = job["spec"], job["spec"]["entrypoint"].split()
    assert (job["apiVersion"], job["kind"], words[:4]) == ("ray.io/v1", "RayJob", ["python", "-m", "rtpo_ray", "train"])
    config = load_config(CONF.parent / words[words.index("--config") + 1], words[words.index("--config") + 2:])
    assert config.run.resume and config.cluster.autoscaling and spec["backoffLimit"] > 0 and spec["rayClusterSpec"]["enableInTreeAutoscaling"]
    groups = {group["groupName"]: group for group in spec["rayClusterSpec"]["workerGroupSpecs"]}
    for name, resource, gpus, most in (("learner", config.learner.resource, config.learner.gpus, 1),
                                       ("generators", config.generators.resource, config.generators.gpus, config.generators.max)):
        group = groups[name]
        offered = json.loads(json.loads(group["rayStartParams"]["resources"]))[resource]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == f"{offered * gpus:g}"
        assert group["maxReplicas"] == most and {mount["mountPath"] for mount in container["volumeMounts"]} == {config.run.root}
    assert json.loads(json.loads(groups["learner"]["rayStartParams"]["resources"]))["learner"] >= config.learner.ranks
