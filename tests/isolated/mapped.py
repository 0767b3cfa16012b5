"""Train on a sparse file of 30 GB; print the private memory of all processes in MB. A script."""

import sys
from pathlib import Path

import numpy as np

import hydrax

ROW_COUNT = 30 * 2**30 // 4096
FILE_COUNT = 10


def private_mb(pid):
    """What a process has for itself, mapped pages of files included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


class SparseFile:
    """Writes nothing where there is much to write."""

    closed = False

    def __init__(self, file):
        self.file = file

    def write(self, content):
        """Write little; skip much."""
        nbytes = memoryview(content).nbytes
        if nbytes > 2**20:
            self.file.truncate(self.file.seek(nbytes, 1))
        else:
            self.file.write(content)
        return nbytes

    def flush(self):
        """Nothing to do."""


def memory_map(folder):
    """Rows of 1,024 float32 and their loader function."""
    path = folder / "rows.bin"
    with open(path, "wb") as file:
        file.truncate(ROW_COUNT * 4096)
    rows = np.memmap(path, np.float32, "r", shape=(ROW_COUNT, 1024))
    arrays = {"x": ((1024,), np.float32, np.float32)}

    def load(rows, arrays, seeds):
        arrays["x"][:] = rows

    load.is_batched = True
    return load, hydrax.DataGroup(64, rows, loader_arrays=arrays, shuffle_first=True)


def arrow_file(folder):
    """The same rows, with a number each, as a data set that is mapped from a file."""
    import datasets
    import pyarrow as pa

    from hydrax.huggingface import data_group, load_rows

    features = datasets.Features(
        x=datasets.Sequence(datasets.Value("float32"), length=1024), n=datasets.Value("int64")
    )
    count = ROW_COUNT // FILE_COUNT
    zeros = folder / "zeros.bin"
    with open(zeros, "wb") as file:
        file.truncate(count * 4096)
    buffer = pa.py_buffer(np.memmap(zeros, np.uint8, "r"))
    values = pa.Array.from_buffers(pa.float32(), count * 1024, [None, buffer])
    numbers = pa.Array.from_buffers(pa.int64(), count, [None, buffer.slice(0, count * 8)])
    rows = pa.FixedSizeListArray.from_arrays(values, 1024)
    batch = pa.record_batch([rows, numbers], schema=features.arrow_schema)
    parts = []
    for part in range(FILE_COUNT):
        path = folder / f"part{part}.arrow"
        with (
            open(path, "wb") as file,
            pa.ipc.new_stream(pa.PythonFile(SparseFile(file), "w"), batch.schema) as writer,
        ):
            writer.write_batch(batch)
        parts.append(datasets.Dataset.from_file(str(path)))
    dataset = datasets.concatenate_datasets(parts)
    return load_rows, data_group(dataset, 64, shuffle_first=True)


loader, group = {"memmap": memory_map, "arrow": arrow_file}[sys.argv[1]](Path(sys.argv[2]))
assert len(group) == ROW_COUNT // FILE_COUNT * FILE_COUNT or sys.argv[1] == "memmap"
most = 0.0
with hydrax.Dataloader(loader, group, loader_count=2) as batches:
    for number in range(300):
        batch = next(batches)
        assert batch.arrays["x"].shape == (64, 1024)
        del batch
        if number % 50 == 49:
            pids = ["self", *(worker.pid for worker in batches.stats().workers)]
            most = max(most, sum(map(private_mb, pids)))
print(round(most))
