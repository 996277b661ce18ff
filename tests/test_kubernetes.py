"""The manifests of scripts/kubernetes, held against published schemas, and against what the commands and pages say.

The schemas come with packages, so nothing is fetched: Kubernetes' own with kubernetes-validate, JobSet's with
kubeflow-trainer-api, the Spark operator's with kubeflow-spark-api. The last two are classes that leave out what they do
not know: what comes back from them must be what went in. No cluster has run the manifests.
"""

import argparse
import copy
import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_spark_api.models.spark_v1beta2_spark_application import SparkV1beta2SparkApplication
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from tfdp_rec.cli import serve as serve_command
from tfdp_rec.cli import server, train
from tfdp_rec.distribute import Cluster
from tfdp_rec.job.run_state import RUN
from tfdp_rec.serving import Server

FOLDER = Path(__file__).parent.parent / "scripts" / "kubernetes"
OBJECTS = {
    (path.stem, found["kind"]): found
    for path in sorted(FOLDER.glob("*.yaml"))
    for found in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}
OTHERS = {"JobSet": JobsetV1alpha2JobSet, "SparkApplication": SparkV1beta2SparkApplication}
VERSIONS = ["1.30", kubernetes_validate.latest_version()]


def jobs(jobset):
    """The jobs that a JobSet makes, as objects of Kubernetes."""
    parts = [part["template"]["spec"] for part in jobset["spec"]["replicatedJobs"]]
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": spec} for spec in parts]


def check(found):
    """Raises where an object does not fit its schema."""
    known = OTHERS.get(found["kind"])
    if known is not None:
        assert known.from_dict(copy.deepcopy(found)).to_dict() == found
    for each in jobs(found) if found["kind"] == "JobSet" else [] if known else [found]:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_manifests_are_those_that_the_pages_name():
    kinds = {
        "training": {"ConfigMap", "JobSet", "NetworkPolicy"},
        "spark": {"SparkApplication", "NetworkPolicy"},
        "serving": {"Deployment", "Service", "NetworkPolicy"},
    }
    assert set(OBJECTS) == {(file, kind) for file in kinds for kind in kinds[file]}


@pytest.mark.parametrize("key", OBJECTS, ids="-".join)
def test_a_manifest_fits_its_schema(key):
    check(OBJECTS[key])


WRONG = {
    ("training", "JobSet", "spec replicatedJobs 0 replica"): 2,
    ("training", "JobSet", "spec replicatedJobs 0 name"): 2,
    ("training", "JobSet", "spec replicatedJobs 0 dependsOn"): [{"name": "ps"}],
    ("training", "JobSet", "spec successPolicy"): {"operators": "All"},
    ("training", "JobSet", "spec replicatedJobs 0 template spec template spec containers 0 readinessProbe port"): 1,
    ("training", "JobSet", "spec replicatedJobs 0 template spec completionMod"): "Indexed",
    ("training", "JobSet", "spec replicatedJobs 0 template spec parallelism"): "two",
    ("training", "NetworkPolicy", "spec ingress 0 from 0 podSelectors"): {},
    ("training", "NetworkPolicy", "spec podSelector"): "spring",
    ("training", "ConfigMap", "data cluster.json"): {},
    ("spark", "SparkApplication", "spec mainApplication"): "local:///main.py",
    ("spark", "SparkApplication", "spec driver memory"): 8,
    ("spark", "SparkApplication", "spec executor instance"): 4,
    ("spark", "SparkApplication", "spec restartPolicy types"): "Never",
    ("serving", "Deployment", "spec template spec containers 0 readinessProbe httpGet paths"): "/",
    ("serving", "Deployment", "spec template spec terminationGracePeriodSecond"): 3,
    ("serving", "Deployment", "spec replicas"): "2",
    ("serving", "Service", "spec ports 0 port"): "http",
}


@pytest.mark.parametrize("file, kind, where", WRONG, ids=[" ".join(key) for key in WRONG])
def test_what_does_not_fit_is_found(file, kind, where):
    found, (*way, last) = copy.deepcopy(OBJECTS[file, kind]), where.split()
    place = found
    for step in way:
        place = place[int(step) if step.isdigit() else step]
    place[last] = WRONG[file, kind, where]
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        check(found)


# What the commands say.

JOBSET, POLICY = OBJECTS["training", "JobSet"], OBJECTS["training", "NetworkPolicy"]
PARTS = {part["name"]: part["template"]["spec"] for part in JOBSET["spec"]["replicatedJobs"]}
CLUSTER = Cluster.from_json(OBJECTS["training", "ConfigMap"]["data"]["cluster.json"])


def pod(part):
    return PARTS[part]["template"]["spec"]


def container(spec):
    (found,) = spec["containers"]
    return found


def parse(command, words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_known_args(words)


def test_the_cluster_is_the_pods_that_the_jobset_makes():
    name = JOBSET["metadata"]["name"]
    for part, addresses in (("worker", CLUSTER.workers), ("ps", CLUSTER.servers)):
        job, (port,) = PARTS[part], container(pod(part))["ports"]
        hosts = [f"{name}-{part}-0-{i}.{name}:{port['containerPort']}" for i in range(job["parallelism"])]
        assert list(addresses) == hosts and job["completions"] == job["parallelism"]
        assert job["completionMode"] == "Indexed"
    mounted = {volume["name"]: volume for volume in pod("chief")["volumes"]}["cluster"]["configMap"]["name"]
    assert mounted == OBJECTS["training", "ConfigMap"]["metadata"]["name"]


@pytest.mark.parametrize("part", ["ps", "worker"])
def test_each_server_is_told_which_one_it_is(part):
    (line,) = container(pod(part))["args"]
    words = [word.replace("$JOB_COMPLETION_INDEX", "1") for word in shlex.split(line)]
    assert words[:3] == ["exec", "tfdp-rec", "server"]
    args, unknown = parse(server, words[3:])
    assert not unknown and (args.job, args.index, args.open_to_the_network) == (part, 1, True)
    assert args.cluster == "/cluster/cluster.json" and CLUSTER.check_task(args.job, args.index)


def test_the_chief_goes_on_from_the_checkpoint_that_it_wrote():
    (line,) = container(pod("chief"))["args"]
    told = re.search(r"\$\(test ! -e (\S+) \|\| echo (\S+)\)", line)
    words = shlex.split(line.replace(told[0], told[2]))
    args, unknown = parse(train, words[3:])
    assert args.quiet, "counts of the log's rows and users would stand in the cluster's logs"
    assert not unknown and args.resume and told[1] == f"{args.checkpoint}/{RUN}" and args.cluster
    assert JOBSET["spec"]["successPolicy"]["targetReplicatedJobs"] == ["chief"]
    assert pod("chief")["restartPolicy"] == "Never" and PARTS["chief"]["backoffLimit"] == 0


def test_the_pods_of_a_training_reach_each_other_alone():
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": JOBSET["metadata"]["name"]}}
    port = [{"protocol": "TCP", "port": int(CLUSTER.servers[0].rpartition(":")[2])}]
    assert POLICY["spec"]["podSelector"] == own and set(POLICY["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert POLICY["spec"]["ingress"] == [{"from": [{"podSelector": own}], "ports": port}]
    to_own, to_dns = POLICY["spec"]["egress"]
    assert to_own == {"to": [{"podSelector": own}], "ports": port}
    assert {each["port"] for each in to_dns["ports"]} == {53} and len(to_dns["to"]) == 1


def test_spark_runs_the_command():
    spec = OBJECTS["spark", "SparkApplication"]["spec"]
    command, *words = spec["arguments"]
    args, unknown = parse(train, words)
    assert command == "train" and unknown in ([], ["--engine", "spark"])
    assert args.quiet and args.data and args.user and args.out
    place = spec["mainApplicationFile"].partition("site-packages/")[2]
    assert (FOLDER.parents[1] / place).is_file() and spec["restartPolicy"] == {"type": "Never"}
    own = {"matchLabels": {"sparkoperator.k8s.io/app-name": OBJECTS["spark", "SparkApplication"]["metadata"]["name"]}}
    policy = OBJECTS["spark", "NetworkPolicy"]["spec"]
    assert policy["podSelector"] == own and policy["ingress"] == [{"from": [{"podSelector": own}]}]


SERVING = OBJECTS["serving", "Deployment"]["spec"]["template"]["spec"]


def test_the_server_is_probed_where_it_answers_and_has_its_time_to_end(exported_server):
    command = container(SERVING)["command"]
    args, unknown = parse(serve_command, command[2:])
    assert command[:2] == ["tfdp-rec", "serve"] and not unknown and args.open_to_the_network
    (port,) = container(SERVING)["ports"]
    assert port["containerPort"] == args.port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container(SERVING)[probe]["httpGet"]
        assert asked == {"path": f"/v1/models/{args.name}", "port": port["name"]}
        assert exported_server._facts.keys() >= {asked["path"]}
    (pause,) = [int(word) for word in container(SERVING)["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    assert SERVING["terminationGracePeriodSeconds"] > pause + exported_server.patience
    service, policy = OBJECTS["serving", "Service"]["spec"], OBJECTS["serving", "NetworkPolicy"]["spec"]
    labels = OBJECTS["serving", "Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == labels == policy["podSelector"]["matchLabels"] and policy["egress"] == []
    (mounted,) = [each for each in container(SERVING)["volumeMounts"] if each["name"] == "shared"]
    assert mounted["subPath"].endswith("/release") and mounted["readOnly"] and mounted["mountPath"] == args.folder


@pytest.fixture
def exported_server():
    class Nothing:
        def metadata(self):
            return {}

    with Server(Nothing(), port=0) as server:
        yield server


@pytest.mark.parametrize("spec", [*map(pod, PARTS), SERVING], ids=[*PARTS, "serving"])
def test_pods_may_do_no_more_than_they_must(spec):
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 1000
    assert spec["automountServiceAccountToken"] is False
    allowed = container(spec)["securityContext"]
    assert allowed["readOnlyRootFilesystem"] and allowed["allowPrivilegeEscalation"] is False
    assert allowed["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container(spec)["resources"]["limits"] and container(spec)["resources"]["requests"]
