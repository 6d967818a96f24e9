"""The place gke: a JobSet on TPU slices of a cluster. JobSet itself restarts pods, as often as `max_retries` says.

JobSet waits for all of its slices. Where the job is elastic, a set of which slices are missing for long is made anew
with those that are there.

Sources, read in 2026: jobset.sigs.k8s.io for JobSet, whose failure policies have rules since its version 0.6;
kubernetes.io for podFailurePolicy; docs.cloud.google.com/kubernetes-engine/docs/concepts/tpus for nodes.
"""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from gspmd_lm import files
from gspmd_lm.errors import WRONG_INPUT, InputError
from gspmd_lm.launch import archive, bucket, place
from gspmd_lm.launch import logs as log_files
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.place import Place, State

_ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
_CHIPS_OF_NODE = 4  # of every slice with several nodes
MISSING_S = 900  # that an elastic job waits for missing slices: three times as long as processes wait for each other
# Of the slices of a set, those of which all pods run: jobset.sigs.k8s.io/docs/reference, ReplicatedJobStatus.
_THERE = "jsonpath={.status.replicatedJobsStatus[0].ready}"
# Makes the set unless it is there, shows the lines of its pods, and ends when it has ended or is gone.
_FOLLOW = """
get() { kubectl get jobset "$1" --output="$2"; }
show() {
  kubectl logs --follow --ignore-errors --max-log-requests=4096 --prefix="$3" --selector="$2" >> "$1" || true
}
show_all() {
  show "$1/pods.txt" "$2" true &
  show "$1/0.log" "$2,jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0" false
  wait
}
set=jobset.sigs.k8s.io/jobset-name=$1
get "$1" name > /dev/null 2>&1 || kubectl create --filename="$2" || exit
while state=$(get "$1" 'jsonpath={.status.conditions[?(@.status=="True")].type}'); do
  case " $state " in
    *" Completed "*) code=0; break ;;
    *" Failed "*)
      code=1
      codes=$(kubectl get pods --selector="$set" --output='jsonpath={..state.terminated.exitCode}')
      case " $codes " in *" WRONG "*) code=WRONG ;; esac
      break
      ;;
  esac
  show_all "$3" "$set"
  sleep "${LAUNCH_POLL_S:-10}"
done
test -s "$3/0.log" || show_all "$3" "$set" # they have ended before anyone looked
test -z "${code:-}" || echo "ENDED $code" >> "$3/0.log"
""".replace("WRONG", str(WRONG_INPUT)).replace("ENDED", log_files.ENDED)
_JOB_SET = """{about}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool # a slice is a node pool
spec:
  ttlSecondsAfterFinished: 86400
  failurePolicy:
    maxRestarts: {restarts}
    rules: # wrong input would be wrong again
      - action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: slice
      replicas: {slices}
      template:
        spec:
          parallelism: {nodes}
          completions: {nodes}
          backoffLimit: 0 # one pod that fails restarts the whole set: the others cannot go on without it
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes: {{operator: In, values: [{wrong_input}]}}
          template:
            spec:
              restartPolicy: Never
              hostNetwork: true
              dnsPolicy: ClusterFirstWithHostNet
              terminationGracePeriodSeconds: 300 # time to save after SIGTERM
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: {accelerator}
                cloud.google.com/gke-tpu-topology: {topology}{spot}
              containers:
                - name: train
                  image: {image}
                  # No shell in between: SIGTERM must reach Python.
                  command:
{command}
                  env:
                    - name: JAX_COORDINATOR_PORT
                      value: "{port}"
                  ports:
                    - containerPort: 8471 # libtpu
                    - containerPort: {port} # jax.distributed
                  resources:
                    limits:
                      google.com/tpu: {chips}
"""
_SPOT = '\n                cloud.google.com/gke-spot: "true"'


class Gke(Place):
    """A JobSet for each attempt. The nodes are the cluster's."""

    needed = ("accelerator", "image")
    tools = ("kubectl", "gcloud")
    restarts_itself = True

    def __init__(self, job: Job):
        super().__init__(job)
        target = job.target
        self._slices = target.slices if target else 1
        self._attempt = ""  # whose set there is
        self._there = 0  # slices that were there when any was last there
        self._complete_s = time.monotonic()  # when all of them were last there

    def state(self) -> State:
        """LOST where slices are missing for too long, and the others could go on."""
        if not self.job.elastic or not self._attempt:
            return State.READY
        name = self._name(self._attempt)
        self._there = int(place.call(["kubectl", "get", "jobset", name, f"--output={_THERE}"]) or 0) or self._there
        if self._there >= self._slices:
            self._complete_s = time.monotonic()
        is_late = time.monotonic() - self._complete_s > MISSING_S
        return State.LOST if is_late and 0 < self._there < self._slices else State.READY

    def owner(self) -> str:
        return self._attempt.rpartition("-")[0]

    def delete(self) -> None:
        """Deletes the set, of which slices are missing. The next one has those that are there."""
        place.call(["kubectl", "delete", "jobset", self._name(self._attempt), "--ignore-not-found"], place.CREATE_S)
        self._slices, self._attempt = self._there, ""

    def check(self) -> None:
        if own := archive.own_files(self.job):
            raise InputError(
                f"train: {own[0]}: is not in the image\n  fix   name a file that is, and make the image anew"
            )
        self._job_set("")
        bucket.check(self.job.workdir)

    def _job_set(self, name: str) -> str:
        target = self.job.target
        if not target or not target.chip or target.chip.name not in _ACCELERATORS:
            raise InputError(f"accelerator: {self.job.accelerator}: no TPU\n  fix   accelerator: v5litepod-16")
        chips = target.chips // target.slices
        words = ["gspmd-lm", "train", *place.with_cache(self.job)]
        return _JOB_SET.format(
            about=place.ABOUT,
            name=name,
            restarts=self.job.max_retries,
            slices=self._slices,
            nodes=max(1, chips // _CHIPS_OF_NODE),
            chips=min(chips, _CHIPS_OF_NODE),
            wrong_input=WRONG_INPUT,
            accelerator=_ACCELERATORS[target.chip.name],
            topology="x".join(map(str, target.topology)),
            spot=_SPOT if self.job.spot else "",
            image=self.job.image,
            port=self.job.port,
            command="\n".join(f"{'':20}- {json.dumps(word)}" for word in words),
        )

    def run(self, attempt: str, logs: Path) -> list[subprocess.Popen[bytes]]:
        name, file = self._name(attempt), logs / "jobset.yaml"
        self._attempt, self._there, self._complete_s = attempt, 0, time.monotonic()
        files.replace(file, self._job_set(name))
        return [place.start(["bash", "-c", _FOLLOW, "follow", name, str(file), str(logs)], logs / "kubectl.txt")]

    def _name(self, attempt: str) -> str:
        return f"{self.job.name[:30]}-{attempt}"

    def exit_code(self, followers: Sequence[subprocess.Popen[bytes]], logs: Path) -> int | None:
        return log_files.exit_code(logs / "0.log")

    def stop(self, attempt: str) -> None:
        """Deletes the set. Its pods get SIGTERM, and 300 seconds to save."""
        place.call(["kubectl", "delete", "jobset", self._name(attempt), "--ignore-not-found", "--wait=false"])

    def kill(self, attempt: str) -> None:
        self.stop(attempt)

    def script(self) -> str:
        return self._job_set(self.job.name)
