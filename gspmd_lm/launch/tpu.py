"""The places tpu-vm and queued-resource: a TPU slice of Google Cloud, whose hosts are reached with gcloud.

Sources, of docs.cloud.google.com, read in 2026: tpu/docs/queued-resources has the states of requests,
tpu/docs/reference/rest/v2/projects.locations.nodes those of slices, tpu/docs/runtimes the images of hosts, and
sdk/gcloud/reference/compute/tpus the commands.
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.launch import archive, bucket, place
from gspmd_lm.launch import logs as log_files
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.place import CommandFailed, Place, State

LABEL = "gspmd-lm-launch"  # its value is the token of the launch that created a slice
_RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# What gcloud prints where a request can never be met. All others, such as that there is no capacity, may pass.
_FINAL = re.compile(r"PERMISSION_DENIED|INVALID_ARGUMENT|UNAUTHENTICATED|Quota|does not have permission")
_FOLDER = "gspmd_lm_launch"  # on each host, in the home folder
_REQUEST_STATES = {"ACTIVE": State.READY, "FAILED": State.LOST, "SUSPENDING": State.LOST, "SUSPENDED": State.LOST}
_SLICE_STATES = {"READY": State.READY, "PREEMPTED": State.LOST, "TERMINATED": State.LOST, "STOPPED": State.LOST}

# Run on each host. uv brings a Python: that of the image may be older than 3.11.
_INSTALL = f"""set -eu
python3 -m pip install --user --quiet uv
rm -rf {_FOLDER}/code
mkdir -p {_FOLDER}/code
tar -xzf {archive.NAME} -C {_FOLDER}/code
cd {_FOLDER}/code
~/.local/bin/uv venv --quiet --python 3.12
~/.local/bin/uv pip install --quiet -e '.[tpu,gcs]'"""
# The run does not end with the connection. Who connects again finds its process and all that it has printed.
_RUN = """set -eu
mkdir -p {attempt}
cd {code}
if ! test -e {attempt}/pid; then
  export JAX_COORDINATOR_PORT={port}
  touch {attempt}/log
  setsid nohup bash -c 'trap : TERM; "$@"; echo $? > {attempt}/code' run {command} >> {attempt}/log 2>&1 < /dev/null &
  echo $! > {attempt}/pid
fi
tail --pid="$(cat {attempt}/pid)" --sleep-interval=0.2 -n +1 -f {attempt}/log
echo "{ended} $(cat {attempt}/code || echo 137)\""""
_SIGNAL = 'kill -{name} -- "-$(cat {attempt}/pid)" || true'


class TpuVm(Place):
    """A slice that is created at once, or that is there already."""

    needed = ("accelerator", "zone")
    tools = ("gcloud", "tar")
    is_rented = True
    has_slices = False  # whether one request may ask for several

    def __init__(self, job: Job):
        super().__init__(job)
        self._target = job.target

    def _gcloud(self, group: str, verb: str, *more: str) -> list[str]:
        where = [f"--zone={self.job.zone}", *([f"--project={self.job.project}"] if self.job.project else ())]
        return ["gcloud", "compute", "tpus", group, verb, *more, *where, "--quiet"]

    def _describe(self, group: str, name: str = "") -> dict[str, Any] | None:
        """The description of a slice or of the request, which may share one name; None if there is none."""
        try:
            text = place.call(self._gcloud(group, "describe", name or self.job.name, "--format=json"))
        except CommandFailed as error:
            if "NOT_FOUND" in str(error) or "was not found" in str(error):
                return None
            raise
        return files.json_object(text, f"gcloud describe {self.job.name}")

    def check(self) -> None:
        self._create("")
        archive.command(self.job, archive.NAME)
        bucket.check(self.job.workdir)

    def state(self) -> State:
        return self._state_of_slice(self.job.name)

    def _state_of_slice(self, name: str) -> State:
        found = self._describe("tpu-vm", name)
        return _SLICE_STATES.get(found.get("state", ""), State.WAITING) if found else State.ABSENT

    def owner(self) -> str:
        return ((self._describe("tpu-vm") or {}).get("labels") or {}).get(LABEL, "")

    @property
    def _accelerator(self) -> list[str]:
        """The words that say what is asked for. Slices have Google Cloud's name, or a type and a topology."""
        target = self._target
        if not target or not target.chip or target.platform != "tpu":
            raise InputError(f"accelerator: {self.job.accelerator}: no TPU\n  fix   accelerator: v5litepod-16")
        if target.chip.name not in _RUNTIMES or (target.slices > 1 and not self.has_slices):
            what, fix = target.chip.name, "gke"
            if target.slices > 1:
                what, fix = f"{target.slices} slices", "queued-resource"
            raise InputError(
                f"accelerator: {self.job.accelerator}: place {self.job.place} has no {what}\n  fix   place: {fix}"
            )
        kind = {"v5e": "v5litepod"}.get(target.chip.name, target.chip.name)
        topology = "x".join(map(str, target.topology))
        number = next((number for number, size in targets.cloud_names(target.chip).items() if size == topology), None)
        if number is None:
            return [f"--type={kind}", f"--topology={topology}"]
        return [f"--accelerator-type={kind}-{number}"]

    def _create(self, token: str) -> list[str]:
        """The command that asks for the slice."""
        version = f"--version={self._runtime}"
        return self._gcloud("tpu-vm", "create", self.job.name, *self._accelerator, version, *self._options(token))

    @property
    def _runtime(self) -> str:
        assert self._target and self._target.chip
        return self.job.runtime_version or _RUNTIMES.get(self._target.chip.name, "")

    def _options(self, token: str) -> list[str]:
        return [*(["--spot"] if self.job.spot else ()), f"--labels={LABEL}={token}"]

    def create(self, token: str) -> None:
        try:
            place.call(self._create(token), place.CREATE_S)
        except CommandFailed as error:
            raise CommandFailed(str(error), bool(_FINAL.search(str(error)))) from error

    def _to_hosts(self, verb: str, *words: str, node: str = "all") -> list[str]:
        """A command for all hosts at once: gcloud would serve 64 of them and then the next ones, which start together.

        node: the slice, if there are several.
        """
        group, nodes = ("queued-resources", (f"--node={node}",)) if self._slices > 1 else ("tpu-vm", ())
        return self._gcloud(group, verb, *words, "--worker=all", *nodes, "--batch-size=all")

    @property
    def _slices(self) -> int:
        return self._target.slices if self._target else 1

    def _ssh(self, command: str, *more: str, node: str = "all") -> list[str]:
        return self._to_hosts("ssh", self.job.name, f"--command={command}", *more, node=node)

    def _send(self, file: str) -> list[str]:
        return self._to_hosts("scp", file, f"{self.job.name}:{archive.NAME}")

    def prepare(self) -> None:
        file = str(archive.make(self.job))
        place.call(self._send(file), place.CREATE_S)
        place.call(self._ssh(_INSTALL), place.CREATE_S)

    def _run(self, attempt: str) -> str:
        """The command of each host in an attempt."""
        command = shlex.join([".venv/bin/python", "main.py", "train", *place.with_cache(self.job)])
        folder = f"~/{_FOLDER}"
        return _RUN.format(
            attempt=f"{folder}/{attempt}",
            code=f"{folder}/code",
            port=self.job.port,
            command=command,
            ended=log_files.ENDED,
        )

    def run(self, attempt: str, logs: Path) -> list[subprocess.Popen[bytes]]:
        # The lines of each host go into a file of its number, and gcloud's own into another. gcloud's exit code says
        # nothing of the run: with several hosts it goes on after one that has failed. Each slice numbers its own hosts.
        followers = []
        for node, folder in enumerate(self._log_folders(logs)):
            folder.mkdir(exist_ok=True)
            command = self._ssh(self._run(attempt), f"--output-directory={folder}", node=str(node))
            followers.append(place.start(command, folder / "gcloud.txt"))
        return followers

    def exit_code(self, followers: Sequence[subprocess.Popen[bytes]], logs: Path) -> int | None:
        are_known = all(any(folder.glob("*.log")) for folder in self._log_folders(logs))
        return super().exit_code(followers, logs) if are_known else None

    def _log_folders(self, logs: Path) -> list[Path]:
        """The folder of each slice's logs, those of an attempt being in `logs`."""
        return [logs / f"slice{node}" if node else logs for node in range(self._slices)]

    def stop(self, attempt: str) -> None:
        place.call(self._ssh(_SIGNAL.format(name="TERM", attempt=f"~/{_FOLDER}/{attempt}")))

    def kill(self, attempt: str) -> None:
        place.call(self._ssh(_SIGNAL.format(name="KILL", attempt=f"~/{_FOLDER}/{attempt}")))

    def delete(self) -> None:
        place.call(self._delete(), place.CREATE_S)

    def script(self) -> str:
        return place.script_of(
            "# Asks for the slice. Leave this out if it is there already.",
            self._create("by-hand"),
            *self._wait,
            "# Sends the code that stands here, and installs it.",
            archive.command(self.job, archive.NAME),
            self._send(archive.NAME),
            self._ssh(_INSTALL),
            "# Trains. Another start needs another name than attempt-1.",
            self._ssh(self._run("attempt-1")),
            f"# The slice costs money until it is given back: {shlex.join(self._delete())}",
        )

    def _delete(self) -> list[str]:
        return self._gcloud("tpu-vm", "delete", self.job.name)

    @property
    def _wait(self) -> list[str]:
        """The lines of a script that wait for the slice; tpu-vm create waits by itself."""
        return []


class QueuedResource(TpuVm):
    """Slices that Google Cloud creates when a queued request reaches capacity.

    Request and slice share one name. Of several slices, each has its number behind it, which Google Cloud adds.
    """

    has_slices = True

    def state(self) -> State:
        found = self._describe("queued-resources")
        if not found:
            return State.ABSENT
        state = _REQUEST_STATES.get((found.get("state") or {}).get("state", ""), State.WAITING)
        # A request may still be ACTIVE when its slice has been preempted (skypilot-org/skypilot, issue 1468).
        if state is not State.READY:
            return state
        names = [f"{self.job.name}-{number}" for number in range(self._slices)] if self._slices > 1 else [self.job.name]
        states = {*map(self._state_of_slice, names)}
        if states & {State.ABSENT, State.LOST}:
            return State.LOST
        return State.WAITING if State.WAITING in states else State.READY

    def owner(self) -> str:
        nodes = ((self._describe("queued-resources") or {}).get("tpu") or {}).get("nodeSpec") or [{}]
        return ((nodes[0].get("node") or {}).get("labels") or {}).get(LABEL, "")

    def _create(self, token: str) -> list[str]:
        node = f"--node-count={self._slices}" if self._slices > 1 else f"--node-id={self.job.name}"
        words = [node, *self._accelerator, f"--runtime-version={self._runtime}"]
        return self._gcloud("queued-resources", "create", self.job.name, *words, *self._options(token))

    def _delete(self) -> list[str]:
        return self._gcloud("queued-resources", "delete", self.job.name, "--force")

    @property
    def _wait(self) -> list[str]:
        ask = self._gcloud("queued-resources", "describe", self.job.name, "--format=value(state.state)")
        return [f'until test "$({shlex.join(ask)})" = ACTIVE; do sleep 30; done']
