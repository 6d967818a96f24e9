"""Stand-ins for gcloud, Slurm, kubectl and what is on a TPU host, which preempt, fail and lie as the real ones do.

`gcloud` keeps one slice of two hosts, each a folder here. `behave` says what happens to it. The program that is
trained is a line of shell for each attempt.
"""

import json
import os
import stat
import sys
import time
import types
from pathlib import Path

from gspmd_lm.errors import STOPPED
from gspmd_lm.launch import loop, places
from gspmd_lm.launch.job import Job

QUICK = loop.Waits(poll=0.03, ask=0.03, look=0.2, retry=0.03, longest=0.05, others=3, stop=5)
HOSTS = 2
_GCLOUD = '''
import json, os, re, sys, time  # what only some commands need is imported there: each command is a process
from pathlib import Path
at = Path(os.environ["STAND_IN"])
words = sys.argv[1:]
with open(at / "calls", "a") as calls:
    calls.write(json.dumps(words) + "\\n")
flags = dict(word.lstrip("-").partition("=")[::2] for word in words if word.startswith("--"))
behaviour = json.loads((at / "behaviour").read_text())
file = at / "slice"

def fail(message, code=1):
    sys.exit(print(f"ERROR: (gcloud) {message}", file=sys.stderr) or code)

HOSTS = int(os.environ["HOSTS"])

def hosts():
    """The numbers of the hosts that a command is for. Those of the second slice follow on those of the first one."""
    count = json.loads(file.read_text())["slices"]
    nodes = range(count) if flags.get("node") == "all" else [int(flags.get("node", 0))]
    return [HOSTS * node + number for node in nodes for number in range(HOSTS)]

def once(name):
    """Whether something is to happen now, and not again."""
    left = behaviour.get(name, 0)
    if left > 0:  # the file is replaced whole: another gcloud may read it now
        behaviour[name] = left - 1
        (at / f"behaviour.{os.getpid()}").write_text(json.dumps(behaviour))
        os.replace(at / f"behaviour.{os.getpid()}", at / "behaviour")
    return left > 0

def found():
    if not file.exists():
        # What describe prints for a name that does not exist: cloud.google.com/apis/design/errors, code NOT_FOUND.
        fail(f"NOT_FOUND: Resource 'projects/p/locations/z/queuedResources/{words[4]}' was not found")
    return json.loads(file.read_text())

def preempt():
    import shutil, signal
    (at / "preempt").unlink()
    for host in at.glob("host*"):
        for pid in host.rglob("pid"):
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(host)  # the disks are lost with the slice: tpu/docs/preemptible
    # A request is SUSPENDING, then SUSPENDED, and stays until it is deleted: tpu/docs/queued-resources. A slice is
    # PREEMPTED, and stays likewise: tpu/docs/preemptible.
    one = found()
    file.write_text(json.dumps(one | {"states": [*behaviour.get("after", ["SUSPENDING", "SUSPENDED"])],
                                      "node": behaviour.get("node_after", "PREEMPTED")}))

def create():
    if once("no_rights"):
        fail("PERMISSION_DENIED: Permission 'tpu.nodes.create' denied on 'projects/p/locations/z'")
    if once("no_capacity"):  # tpu/docs/troubleshooting: no capacity
        fail('RESOURCE_EXHAUSTED: There is no more capacity in the zone "z"; you can try in another zone')
    if file.exists():
        fail(f"ALREADY_EXISTS: Resource {words[4]} already exists")
    states = behaviour.get("states", ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    label = flags.get("labels", "=").partition("=")
    file.write_text(json.dumps({"states": states, "labels": {label[0]: label[2]}, "node": "READY",
                                "slices": int(flags.get("node-count", 1))}))
    if once("lying_create"):  # the answer is lost on its way: the request was made all the same
        fail("DEADLINE_EXCEEDED: Deadline expired before operation could complete.")

def describe():
    one = found()
    if words[2] == "tpu-vm" and one["slices"] > 1 and not re.fullmatch("one-[0-9]", words[4]):
        fail("NOT_FOUND: node was not found")  # nodes have the number behind the name of the request
    if once("no_answer"):  # the API is not available for a while
        fail("UNAVAILABLE: The service is currently unavailable.")
    if words[2] == "tpu-vm":
        if one["node"] is None:
            fail("NOT_FOUND: node was not found")
        print(json.dumps({"state": one["node"], "labels": one["labels"]}))
        return
    state = one["states"][0]
    if len(one["states"]) > 1:
        file.write_text(json.dumps(one | {"states": one["states"][1:]}))
    if flags["format"] == "value(state.state)":
        print(state)
        return
    print(json.dumps({"state": {"state": state}, "tpu": {"nodeSpec": [{"node": {"labels": one["labels"]}}]}}))

def ssh():
    import signal, subprocess
    folder = flags.get("output-directory")
    command = next(word for word in words if word.startswith("--command=")).removeprefix("--command=")
    if once("refused_ssh"):  # a host that has just begun refuses connections
        fail("[/usr/bin/ssh] exited with return code [255].", 255)
    started = []
    for number in hosts():
        home = at / f"host{number}"
        (home / ".local/bin").mkdir(parents=True, exist_ok=True)
        if not (home / ".local/bin/uv").exists():
            (home / ".local/bin/uv").symlink_to(at / "uv")
        # --output-directory: a file for each worker, of its number. sdk/gcloud/reference/compute/tpus/tpu-vm/ssh
        out = open(f"{folder}/{number % HOSTS}.log", "wb") if folder else None
        started.append(subprocess.Popen(["bash", "-c", command], cwd=home, stdout=out, stderr=out,
                                        env=os.environ | {"HOME": str(home)}, start_new_session=True))
    while any(one.poll() is None for one in started):
        time.sleep(0.02)
        if (at / "preempt").exists() and "setsid" in command:
            for one in started:
                os.killpg(one.pid, signal.SIGKILL)
            preempt()
            if once("hanging_ssh"):  # a connection to a host that is gone may hang until TCP gives up
                time.sleep(600)
            fail("[/usr/bin/ssh] exited with return code [255].", 255)
        if (at / "cut").exists() and "setsid" in command:  # the connection alone
            (at / "cut").unlink()
            for one in started:
                os.killpg(one.pid, signal.SIGKILL)
            fail("[/usr/bin/ssh] exited with return code [255].", 255)
    # gcloud goes on after a worker that has failed, and ends with 255 or with the code of one of them:
    # googlecloudsdk/command_lib/compute/tpus/tpu_vm/ssh.py
    sys.exit(255 if any(one.returncode for one in started) else 0)

if words[0] == "storage":
    if behaviour.get("bucket") == "refused":
        fail("HTTPError 403: does not have storage.objects.create access to the Google Cloud Storage object.")
    if words[1] == "ls":  # sdk/gcloud/reference/storage/ls
        if behaviour.get("data") == "missing":
            fail("One or more URLs matched no objects.")
        print("" if behaviour.get("data") == "empty" else words[2])
    sys.exit(0)
if words[3] == "create":
    create()
elif words[3] == "describe":
    describe()
elif words[3] == "delete":
    found()
    if once("not_yet"):  # a request that is being suspended cannot be deleted
        fail("FAILED_PRECONDITION: The resource is being suspended")
    file.unlink()
elif words[3] == "scp":
    import shutil
    for number in hosts():
        (at / f"host{number}").mkdir(exist_ok=True)
        shutil.copy(words[4], at / f"host{number}" / words[5].partition(":")[2])
elif words[3] == "ssh":
    ssh()
'''
# uv makes an environment whose python runs what the attempt of this number does.
_UV = """
case $1 in
  venv) mkdir -p .venv/bin; cp "$STAND_IN/trained" .venv/bin/python ;;
  pip) echo "$HOME $*" >> "$STAND_IN/installed" ;;
esac
"""
_TRAINED = """
number=${SLURM_PROCID:-${JOB_COMPLETION_INDEX:-${HOME##*host}}}
echo "$*" >> "$STAND_IN/given.$number"
count=$(wc -l < "$STAND_IN/given.$number")
eval "$(sed -n "${count}p" "$STAND_IN/attempts")"
"""
# An attempt that saves when it is asked to stop. No host prints its first step before all hosts have set their traps.
SAVES = f"""trap 'echo saved; exit {STOPPED}' TERM; touch "$STAND_IN/ready.$number"
until test "$(ls "$STAND_IN"/ready.* | wc -l)" = {HOSTS}; do sleep 0.05; done
echo step 1/9; while true; do sleep 0.1; done""".replace("\n", "; ")
# Waits until as many hosts as are asked for, two by default, have started as often as the first one.
_ALL_BEGAN = """
{ until test "$(cat "$STAND_IN"/given.* | wc -l)" = $((${1:-2} * $(wc -l < "$STAND_IN/given.0"))); do
    sleep 0.05
  done; } 2> /dev/null
"""
# A cluster of Slurm with two nodes of one GPU. A job is in the queue until it has ended; after the failure of a node it
# is requeued, and in the queue still: slurm.schedmd.com/sbatch.html, --requeue.
_SBATCH = """
if test -e "$STAND_IN/refused"; then
  echo "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified" >&2
  exit 1
fi
name=$(sed -n 's/#SBATCH --job-name=//p' "$1")
echo "$name" >> "$STAND_IN/submitted"
touch "$STAND_IN/queue"
(
  while true; do
    setsid bash "$1" & echo $! > "$STAND_IN/job"; wait
    test -e "$STAND_IN/requeue" || break
    rm "$STAND_IN/requeue"
  done
  rm "$STAND_IN/queue"
) < /dev/null > /dev/null 2>&1 &
"""
# The controller does not always answer, and squeue then prints nothing.
_SQUEUE = """
if test -e "$STAND_IN/no_answer"; then
  mv "$STAND_IN/no_answer" "$STAND_IN/was_silent"
  echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
if test -e "$STAND_IN/queue"; then
  echo "7 gpu one PD"
  test ! -e "$STAND_IN/was_silent" || touch "$STAND_IN/answers_again"
fi
"""
# --kill-on-bad-exit ends the other tasks when one has failed, and the exit code is the highest one:
# slurm.schedmd.com/srun.html. %t in the name of a file is the number of the task.
_SRUN = """
while test "$1" != bash; do
  case $1 in --output=*) output=${1#--output=} ;; esac
  shift
done
for number in 0 1; do
  SLURM_PROCID=$number setsid "$@" >> "${output/\\%t/$number}" 2>&1 & pids+=($!)
done
echo "${pids[@]}" > "$STAND_IN/tasks"
highest=0
for one in 0 1; do
  wait -n "${pids[@]}"; code=$?
  test $code -le $highest || highest=$code
  test $code = 0 || { sleep 0.3; for pid in "${pids[@]}"; do kill -KILL -- -$pid; done 2> /dev/null; }
done
exit $highest
"""
_SCANCEL = """
case "$*" in
  *--signal=TERM*) for pid in $(cat "$STAND_IN/tasks"); do kill -TERM -- -$pid; done ;;
  *) for pid in $(cat "$STAND_IN/tasks") $(cat "$STAND_IN/job"); do kill -KILL -- -$pid; done ;;
esac
exit 0
"""
# A cluster with the JobSet controller, and a set of two pods, which are made anew together until one fails in a way
# that podFailurePolicy names, or maxRestarts is reached: jobset.sigs.k8s.io, "failure policy".
_KUBECTL = """
case $1 in
  get)
    case $2 in
      jobset) test -e "$STAND_IN/set-$3" || { echo 'Error from server (NotFound): jobsets "x" not found' >&2; exit 1; }
        case "$*" in *ready*) cat "$STAND_IN/ready" 2> /dev/null || true ;; *) cat "$STAND_IN/set-$3" ;; esac ;;
      pods) cat "$STAND_IN"/code.* ;;
    esac ;;
  create)
    cp "${2#--filename=}" "$STAND_IN/set.yaml"
    set=$STAND_IN/set-$(sed -n 's/^  name: //p' "$STAND_IN/set.yaml")
    printf StartupPolicyCompleted > "$set"
    most=$(sed -n 's/.*maxRestarts: //p' "$STAND_IN/set.yaml")
    (
      for restart in $(seq 0 "$most"); do
        for number in 0 1; do
          ( JOB_COMPLETION_INDEX=$number "$STAND_IN/trained" > "$STAND_IN/pod.$number" 2>&1
            echo "$? " > "$STAND_IN/code.$number" ) &
        done
        wait
        codes=$(cat "$STAND_IN"/code.*)
        case $codes in *2*) break ;; esac
        case $codes in *[1-9]*) ;; *) printf ' Completed' >> "$set"; exit ;; esac
      done
      printf ' Failed' >> "$set"
    ) < /dev/null > /dev/null 2>&1 & ;;
  logs) sleep 0.3; case "$*" in *index=0*) cat "$STAND_IN/pod.0" ;; *) cat "$STAND_IN"/pod.* ;; esac ;;
  delete) rm "$STAND_IN/set-$3" ;;
esac
"""


class Cloud:
    """One project at Google Cloud, one cluster of Slurm and one of Kubernetes, in a folder."""

    def __init__(self, at: Path, monkeypatch):
        self.at = at
        at.mkdir(parents=True)
        for name, code in {
            "uv": _UV, "trained": _TRAINED, "python3": "true", "sbatch": _SBATCH, "squeue": _SQUEUE, "srun": _SRUN,
            "scancel": _SCANCEL, "all_began": _ALL_BEGAN, "kubectl": _KUBECTL,
        }.items():  # fmt: skip
            self.program(name, f"#!/usr/bin/env bash\n{code}")
        self.program("gcloud", f"#!{sys.executable} -S\n{_GCLOUD}")
        monkeypatch.setenv("PATH", f"{at}:{os.environ['PATH']}")
        monkeypatch.setenv("STAND_IN", str(at))
        monkeypatch.setenv("HOSTS", str(HOSTS))
        monkeypatch.setenv("LAUNCH_POLL_S", "0.1")
        self.behave()
        self.said: list[str] = []

    def program(self, name, code):
        (self.at / name).write_text(code)
        (self.at / name).chmod(stat.S_IRWXU)

    def behave(self, **behaviour):
        (self.at / "behaviour").write_text(json.dumps(behaviour))

    def attempts(self, *lines):
        """What each attempt does on each host."""
        (self.at / "attempts").write_text("".join(f"{line}\n" for line in lines))

    def job(self, place="queued-resource", **keys):
        return Job(**{
            "place": place, "zone": "z", "accelerator": "v5litepod-8", "workdir": "gs://bucket/runs/one", "name": "one",
            "train": "--config=tiny --rules=fsdp8", "logs": str(self.at / "logs"), **keys,
        })  # fmt: skip

    def launch(self, job, usd_per_hour=0.0, tell=lambda line: None, waits=QUICK):
        """The exit code of a launch of a job. tell: sees each line that it says."""

        def say(line):
            self.said.append(line)
            tell(line)

        return loop.Launch(places.find(job), usd_per_hour, say, waits).run()

    def spend_at(self, text, monkeypatch):
        """Ten hours are over when a launch says `text`. What is returned is given to `launch` as `tell`."""
        passed_s = [0.0]
        clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
        monkeypatch.setattr("gspmd_lm.launch.budget.time", clock)

        def tell(line):
            passed_s[0] = 36_000 if line == text else passed_s[0]

        return tell

    def calls(self, verb):
        """The commands of gcloud with a verb."""
        every = [json.loads(line) for line in (self.at / "calls").read_text().splitlines()]
        return [words for words in every if words[3] == verb]

    def started(self, host=0):
        """What was trained on a host, once for each start."""
        file = self.at / f"given.{host}"
        return file.read_text().splitlines() if file.exists() else []
