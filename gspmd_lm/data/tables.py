"""Texts and records from files with columns: Parquet, and Arrow in both of its formats."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gspmd_lm.errors import InputError, did_you_mean

OR_LEAVE_OUT = "\n        or leave the file out: data.source may be a list of files and globs"


@contextlib.contextmanager
def _table(path: Path) -> Iterator[tuple[Any, Callable[[list[str] | None], Iterator[Any]]]]:
    """The schema of a table in a file, and a function that reads some of its columns (None: all) batch by batch."""
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow, lambda columns: file.iter_batches(batch_size=1024, columns=columns)
        return
    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            mapped.seek(0)
            file = pyarrow.ipc.open_file(mapped)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            schema = file.schema
        else:  # the stream format, which `datasets` writes
            mapped.seek(0)
            batches = pyarrow.ipc.open_stream(mapped)
            schema = batches.schema
        yield schema, lambda columns: (batch.select(columns) if columns else batch for batch in batches)


def texts(path: Path, field: str) -> Iterator[bytes]:
    """The texts in the column `field`. Raises an InputError that lists the columns if it is not a column of texts."""
    import pyarrow

    with _table(path) as (schema, batches):
        if field not in schema.names:
            raise InputError(
                f"{path}: no column {field}{did_you_mean(field, schema.names)}\n"
                f"  fix   set data.text_field to one of {', '.join(schema.names)}"
                + (", or for conversations data.messages_field" if _any_list(schema) else "")
                + OR_LEAVE_OUT
            )
        kind = schema.field(field).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
            fix = f"for conversations set data.messages_field={field}" if _is_list(kind) else "set data.text_field"
            raise InputError(f"{path}: column {field} is {kind}, not text\n  fix   {fix}")
        for batch in batches([field]):
            yield from (text or b"" for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist())


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows, each with its place."""
    number = 0
    with _table(path) as (_, batches):
        for batch in batches(None):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", record


def _any_list(schema: Any) -> bool:
    return any(_is_list(kind) for kind in schema.types)


def _is_list(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
