"""Reading and writing Parquet files. Only this module imports pyarrow (extra ``rasura[parquet]``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError, MissingExtra


def check_installed() -> None:
    """Raise ``MissingExtra`` without pyarrow. Call this before computing what will be written."""
    try:
        import pyarrow.parquet  # noqa: F401  # only whether it is there
    except ImportError:
        raise MissingExtra("Parquet files need pyarrow; run: pip install 'rasura[parquet]', or use .jsonl or .csv") from None


def read_rows(path: Path, wanted: Callable[[tuple[str, ...]], list[str]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbered rows of the columns that ``wanted`` chooses from all names, batch by batch.

    Raises ``InputError`` if the file is incomplete, ``MissingExtra`` without pyarrow.
    """
    check_installed()
    import pyarrow as pa
    import pyarrow.parquet as parquet

    def broken(error: Exception) -> InputError:
        # The library's own words may quote the file.
        return InputError(f"{path} cannot be read as Parquet ({type(error).__name__}); expected a complete file")

    try:
        table = parquet.ParquetFile(path)
        names = tuple(table.schema_arrow.names)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise broken(error) from None
    number = 0
    batches = table.iter_batches(1024, columns=wanted(names))
    while True:
        try:
            batch = next(batches, None)
            rows = [] if batch is None else batch.to_pylist()
        except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
            raise broken(error) from None
        if batch is None:
            return
        for row in rows:
            number += 1
            yield number, row


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write ``rows``, whose keys are the columns. Raises ``MissingExtra`` without pyarrow."""
    check_installed()
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
