"""A bucket of Google's object store on this machine: gcp-storage-emulator, with the two things that it lacks.

    pip install -e ".[dev,gcs]" gcp-storage-emulator
    python -m tests.attacks.bucket 9023      # and then what environment() says, to run anything against gs://bucket

The emulator (2026.7.19) leaves out the conditions under which a request is to be carried out, and the header that names
an object's generation: tensorstore reads that header, and "make this object only if there is none" is a condition.
"""

import logging
import sys
from http import HTTPStatus

HERE = "127.0.0.1"


def environment(port, host=HERE):
    """What makes gcsfs and tensorstore use the emulator, without credentials."""
    url = f"http://{host}:{port}"
    return {
        "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GCE_METADATA_DETECT_RETRIES": "1",  # to look three times for a machine of Google takes seconds
        "GOOGLE_CLOUD_PROJECT": "none", "GCSFS_DEFAULT_TOKEN": "anon", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }  # fmt: skip


def serve(port, host=HERE):
    """Serves the bucket `bucket` from memory until the process is ended."""
    from gcp_storage_emulator import server
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.storage import Storage

    # At each change it writes a list of all objects, also of those that were deleted, for its next start.
    Storage._write_config_to_file = lambda self: None
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)

    def named(request):
        """The bucket and the object that a request is about; None for others."""
        bucket = (request.params or {}).get("bucket_name")
        name = (request.params or {}).get("object_id") or (request.query.get("name") or [None])[0]
        if not name and request.method == "POST" and isinstance(request.data, dict):
            name = request.data.get("name") or request.data.get("meta", {}).get("name")
        return (bucket, name) if bucket and name else None

    def generation(storage, place):
        try:
            return str(storage.get_file_obj(*place)["generation"])
        except NotFound:
            return "0"

    def conditional(handler):
        def handle(request, response, storage):
            place = named(request)
            now = generation(storage, place) if place else "0"
            wanted, unwanted = ((request.query.get(f"ifGeneration{word}Match") or [None])[0] for word in ("", "Not"))
            if wanted is not None and wanted != now:
                response.status = HTTPStatus.PRECONDITION_FAILED
            elif unwanted is not None and unwanted == now:
                response.status = HTTPStatus.NOT_MODIFIED
            else:
                handler(request, response, storage)
                if place and request.method == "GET":
                    response["x-goog-generation"] = now

        return handle

    for _, handlers in server.HANDLERS:
        for method in handlers:
            handlers[method] = conditional(handlers[method])
    server.create_server(host, port, in_memory=True, default_bucket="bucket").run()


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
