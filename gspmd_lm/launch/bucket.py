"""Whether a bucket of Google Cloud can be written, and whether it has what is read from it."""

import secrets

from gspmd_lm.errors import InputError
from gspmd_lm.launch import place
from gspmd_lm.launch.place import CommandFailed


def check(workdir: str) -> None:
    """Raises InputError if a workdir is not in a bucket, or if a small object cannot be written there and deleted.

    gcloud writes it, as the person who has logged in. The hosts write as their service account.
    """
    bucket, _, path = workdir.removeprefix("gs://").partition("/")
    if not workdir.startswith("gs://") or not bucket or not path.strip("/"):
        raise InputError(
            f"workdir: {workdir}: the disks of a slice are lost with it, so the workdir is in a bucket\n"
            "  fix   workdir: gs://bucket/runs/name"
        )
    probe = f"{workdir.rstrip('/')}/.launch-{secrets.token_hex(4)}"
    try:
        place.call(["gcloud", "storage", "cp", "-", probe, "--quiet"], stdin="written by launch\n")
        place.call(["gcloud", "storage", "rm", probe, "--quiet"])
    except CommandFailed as error:
        raise InputError(
            f"workdir: {workdir} cannot be written: {error}\n"
            "  fix   make the bucket, or have the right to create and delete objects in it"
        ) from error


def check_there(key: str, address: str) -> None:
    """Raises InputError if a bucket has no object of an address, which may hold * or name a folder, or is not seen."""
    try:
        found = place.call(["gcloud", "storage", "ls", address, "--quiet"])
    except CommandFailed as error:
        found, why = "", f": {error}"
    else:
        why = ": it is empty"
    if not found.strip():
        fix = f"put it there, or give another --set {key}=..."
        raise InputError(f"{key}: nothing is to be read at {address}{why}\n  fix   {fix}")
