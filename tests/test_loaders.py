"""Ready-made loaders, on real files."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hydrax import Batch, DataGroup, Dataloader, ImageError, LoaderError, pack_sequences
from hydrax.image import Coefs
from hydrax.loaders import (
    ArrayLoader,
    ImageFolder,
    PackedTokenLoader,
    ParquetLoader,
    TokenLoader,
)

NUMBER = {"x": ((), np.int32, np.int32)}


class TestBatched:
    @staticmethod
    def load_rows(descriptors, arrays, seeds):
        arrays["x"][:] = descriptors
        return {"together": [len(descriptors)] * len(descriptors)}

    @staticmethod
    def run(loader, **options):
        group = DataGroup(4, range(8), loader_arrays=NUMBER)
        with Dataloader(loader, group, loader_count=0, end_at=("epoch", 1), **options) as batches:
            return [(batch.arrays["x"].tolist(), batch.additional["together"]) for batch in batches]

    def test_a_loader_function_can_say_itself_that_it_is_batched(self):
        def load(descriptors, arrays, seeds):
            return self.load_rows(descriptors, arrays, seeds)

        load.is_batched = True
        assert self.run(load) == [([0, 1, 2, 3], [4] * 4), ([4, 5, 6, 7], [4] * 4)]
        assert self.run(load) == self.run(self.load_rows, batched=True)

    def test_the_argument_counts_more_than_the_attribute(self):
        def load(descriptor, arrays, seed):
            arrays["x"][...] = descriptor
            return {"together": 1}

        load.is_batched = True
        assert self.run(load, batched=False) == [([0, 1, 2, 3], [1] * 4), ([4, 5, 6, 7], [1] * 4)]


def epoch(loader, group=None, **options):
    """The batches of an epoch, with arrays of their own."""
    options = {"loader_count": 0, "end_at": ("epoch", 1)} | options
    with Dataloader(loader, loader.group(4) if group is None else group, **options) as dataloader:
        return list(map(Batch.copy, dataloader))


def table_of(batches, name):
    """Index of each item to its values in an array."""
    return {
        index: np.asarray(values)
        for batch in batches
        for index, values in zip(batch.indices, np.asarray(batch.arrays[name]), strict=True)
    }


PLACES = [{}, {"loader_count": 2}, {"loader_count": 1, "start_method": "spawn"}]


def memory_map(path, array, **options):
    array.tofile(path)
    return np.memmap(path, array.dtype, "r", shape=array.shape, **options)


class TestArrayLoader:
    @pytest.mark.parametrize("place", PLACES)
    def test_rows_of_arrays_and_memory_maps_arrive(self, tmp_path, rng, place):
        x = rng.normal(size=(101, 3, 2)).astype(np.float32)
        y = rng.integers(0, 200, 101, np.uint8)
        loader = ArrayLoader(x=memory_map(tmp_path / "x", x), y=y, z=(y % 2 == 0))
        group = loader.group(8, shuffle_first=True, remainder="short")
        batches = epoch(loader, group, **place)
        for name, source in (("x", x), ("y", y), ("z", y % 2 == 0)):
            rows = table_of(batches, name)
            assert sorted(rows) == list(range(101))
            np.testing.assert_array_equal([rows[i] for i in range(101)], source)

    @pytest.mark.parametrize("way", ["slice", "transposed", "fortran", "big-endian", "list", "jax"])
    def test_whatever_is_an_array_is_loaded(self, rng, way):
        x = rng.integers(-100, 100, (20, 4), np.int16)
        given = {
            "slice": np.repeat(x, 2, axis=1)[:, ::2],
            "transposed": np.ascontiguousarray(x.T).T,
            "fortran": np.asfortranarray(x),
            "big-endian": x.astype(">i2"),
            "list": x.tolist(),
            "jax": jnp.asarray(x),
        }[way]
        rows = table_of(epoch(loader := ArrayLoader(x=given), loader.group(5)), "x")
        np.testing.assert_array_equal([rows[i] for i in range(20)], x)

    def test_arrays_come_in_a_dict_too(self):
        loader = ArrayLoader({"x": np.arange(4), "a b": np.arange(4) * 2}, y=np.zeros(4))
        (batch,) = epoch(loader, loader.group(4))
        assert list(batch.arrays) == ["x", "a b", "y"]
        assert batch.arrays["a b"].tolist() == [0, 2, 4, 6]

    @pytest.mark.parametrize(
        ("items", "words"),
        [
            (np.array([True] * 4), r"array of bool .*; np\.flatnonzero\(mask\)"),
            ([True, False], "array of bool"),
            ([0.5], "array of float64 .*; expected integers"),
            ([[0, 1]], r"shape \(1, 2\)"),
        ],
    )
    def test_items_that_are_no_positions_are_refused(self, items, words):
        with pytest.raises(TypeError, match=words):
            ArrayLoader(x=np.arange(4)).group(1, items=items)

    def test_items_and_dtypes_can_be_chosen(self):
        loader = ArrayLoader(x=np.arange(10, dtype=np.uint8))
        group = loader.group(2, items=(9, 3, 3, 0), jax_dtypes={"x": jnp.bfloat16})
        batches = epoch(loader, group)
        assert [batch.arrays["x"].tolist() for batch in batches] == [[9, 3], [3, 0]]
        assert batches[0].arrays["x"].dtype == jnp.bfloat16
        assert epoch(loader, loader.group(2, items=range(4, 8)))[1].arrays["x"].tolist() == [6, 7]

    def test_what_is_not_there_is_refused(self):
        loader = ArrayLoader(x=np.arange(10))
        with pytest.raises(IndexError, match="item 10 of 10"):
            loader.group(2, items=[0, 10])
        with pytest.raises(IndexError, match="item -1 of 10"):
            loader.group(2, items=range(-1, 3))
        with pytest.raises(KeyError, match="no array 'y'; there are"):
            loader.group(2, jax_dtypes={"y": np.int8})
        other = DataGroup(2, range(9, 13), loader_arrays=loader.loader_arrays)
        with pytest.raises(LoaderError, match="item 10 of 10"):
            epoch(loader, other)

    @pytest.mark.parametrize(
        ("arrays", "error", "words"),
        [
            ({}, ValueError, "no arrays"),
            ({"x": np.zeros(3), "y": np.zeros(4)}, ValueError, "'x': 3, 'y': 4"),
            ({"x": np.float32(1)}, TypeError, "x is float32"),
            ({"x": np.zeros(())}, TypeError, "single number"),
            ({"x": "text"}, TypeError, "x is str"),
            ({"x": np.ma.masked_array([1, 2], [0, 1])}, TypeError, "x is a masked array"),
        ],
    )
    def test_what_are_no_arrays_of_rows_is_refused(self, arrays, error, words):
        with pytest.raises(error, match=words):
            ArrayLoader(**arrays)

    def test_memory_maps_are_sent_as_the_names_of_their_files(self, tmp_path):
        x = np.arange(200_000, dtype=np.int32).reshape(-1, 2)
        mapped = memory_map(tmp_path / "x", x)
        np.save(tmp_path / "y.npy", x)
        loaded = np.load(tmp_path / "y.npy", mmap_mode="r")
        loader = ArrayLoader(x=mapped[50:].reshape(-1, 1, 2), y=loaded[50:])
        sent = pickle.dumps(loader)
        assert len(sent) < 2000
        received = pickle.loads(sent)
        for name in ("x", "y"):
            rows = table_of(epoch(received, received.group(5, items=range(10))), name)
            np.testing.assert_array_equal([rows[i].ravel() for i in range(10)], x[50:60])
        by_columns = ArrayLoader(x=mapped[:, :1])
        assert len(pickle.dumps(by_columns)) > 4 * 100_000


class TestTokenLoader:
    @pytest.fixture
    def tokens(self, tmp_path, rng):
        return memory_map(tmp_path / "tokens", rng.integers(0, 2**16, 1003, np.uint16))

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("dtype", [None, np.int32, np.uint32])
    def test_packed_windows_hold_each_token_once_and_targets_the_next(self, tokens, dtype, place):
        loader = TokenLoader(tokens, 10, dtype=dtype)
        assert len(loader) == 100
        batches = epoch(loader, loader.group(8, shuffle_first=True, remainder="short"), **place)
        assert batches[0].arrays["tokens"].dtype == (dtype or np.uint16)
        inputs, targets = (table_of(batches, name) for name in ("tokens", "targets"))
        np.testing.assert_array_equal(
            np.concatenate([inputs[i] for i in range(100)]), tokens[:1000]
        )
        np.testing.assert_array_equal(
            np.concatenate([targets[i] for i in range(100)]), tokens[1:1001]
        )

    def test_the_last_window_needs_a_token_behind_it_for_its_target(self):
        tokens = np.arange(20, dtype=np.uint16)
        assert len(TokenLoader(tokens, 10)) == 1
        without = TokenLoader(tokens, 10, targets=False)
        assert len(without) == 2
        assert list(without.loader_arrays) == ["tokens"]
        with pytest.raises(ValueError, match="no window of 20 and the token"):
            TokenLoader(tokens, 20)

    def test_random_windows_begin_anywhere_and_follow_from_the_seed(self):
        tokens = np.arange(5000, dtype=np.int32)
        loader = TokenLoader(tokens, 10, windows="random")
        group = loader.group(10, shuffle_first=True)
        run = {"end_at": ("epoch", 4)}
        batches = epoch(loader, group, **run)
        windows = np.concatenate([batch.arrays["tokens"] for batch in batches])
        assert (np.diff(windows, axis=1) == 1).all()
        targets = np.concatenate([batch.arrays["targets"] for batch in batches])
        np.testing.assert_array_equal(targets, windows + 1)
        starts = windows[:, 0]
        assert len(set(starts)) > 1400  # of 1996 draws from 4990
        assert np.histogram(starts, 4, (0, 4990))[0].min() > 400
        again = epoch(loader, group, loader_count=2, **run)
        np.testing.assert_array_equal(
            windows, np.concatenate([batch.arrays["tokens"] for batch in again])
        )

    def test_random_windows_reach_both_ends(self):
        tokens = np.arange(8, dtype=np.int32)
        loader = TokenLoader(tokens, 5, windows="random")
        batches = epoch(loader, loader.group(1), end_at=("epoch", 60))
        assert {int(batch.arrays["tokens"][0, 0]) for batch in batches} == {0, 1, 2}

    def test_validation_windows_are_packed(self):
        loader = TokenLoader(np.arange(41, dtype=np.int32), 10, windows="random")
        validation = ("epoch", 1, loader.group(4))
        last = epoch(loader, validation=validation)[-1]
        assert last.is_validation
        assert last.arrays["tokens"][:, 0].tolist() == [0, 10, 20, 30]

    def test_a_token_that_the_dtype_cannot_hold_is_an_error(self):
        loader = TokenLoader(np.array([1, 2, 2**31, 4]), 1, dtype=np.int32)
        with pytest.raises(LoaderError, match="2147483648 does not fit int32"):
            epoch(loader, loader.group(1))

    @pytest.mark.parametrize(
        ("tokens", "options", "error", "words"),
        [
            (np.zeros((3, 3), np.int32), {}, TypeError, r"shape \(3, 3\)"),
            (np.zeros(30), {}, TypeError, "float64"),
            ([1, 2, 3], {}, TypeError, "tokens is list"),
            (np.zeros(30, int), {"windows": "all"}, ValueError, "windows is 'all'"),
        ],
    )
    def test_what_cannot_be_is_refused(self, tokens, options, error, words):
        with pytest.raises(error, match=words):
            TokenLoader(tokens, 2, **options)


class TestPackedTokenLoader:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("keep_order", [False, True])
    def test_each_sequence_lies_whole_in_one_row(self, tmp_path, rng, place, keep_order):
        lengths = rng.integers(1, 40, 300)
        starts = np.concatenate([[5], 5 + np.cumsum(lengths)])
        tokens = memory_map(tmp_path / "t", rng.integers(1, 2**16, starts[-1] + 9, np.uint16))
        loader = PackedTokenLoader(tokens, starts, 64, keep_order=keep_order, dtype=np.int32)
        group = loader.group(8, shuffle_first=True, remainder="short")
        rows = {
            name: table_of(epoch(loader, group, **place), name)
            for name in ("tokens", "segment_ids", "positions")
        }
        plan = pack_sequences(lengths, 64, keep_order=keep_order)
        assert sorted(rows["tokens"]) == list(range(len(plan)))
        seen = Counter()
        for index, pack in enumerate(plan):
            segments = rows["segment_ids"][index]
            filled = int(lengths[pack].sum())
            assert not any(rows[name][index][filled:].any() for name in rows)
            for segment, sequence in enumerate(pack, 1):
                here = segments == segment
                expected = tokens[starts[sequence] : starts[sequence + 1]]
                np.testing.assert_array_equal(rows["tokens"][index][here], expected)
                np.testing.assert_array_equal(
                    rows["positions"][index][here], np.arange(len(expected))
                )
                seen[int(sequence)] += 1
        assert seen == Counter(range(300))

    def test_a_sequence_that_is_too_long_is_refused_left_out_or_cut_off(self):
        tokens = np.arange(1, 11)
        with pytest.raises(ValueError, match="item 1 has length 7"):
            PackedTokenLoader(tokens, [0, 3, 10], 5)
        loader = PackedTokenLoader(tokens, [0, 3, 10], 5, too_long="truncate")
        assert table_of(epoch(loader), "tokens")[0].tolist() == [4, 5, 6, 7, 8]
        assert len(PackedTokenLoader(tokens, [0, 3, 10], 5, too_long="drop")) == 1

    @pytest.mark.parametrize("starts", [[0], [0, 5, 3], [-1, 4], [0, 11], [0.0, 3.0], [[0, 1]]])
    def test_starts_that_cannot_be_are_refused(self, starts):
        with pytest.raises(ValueError, match="starts"):
            PackedTokenLoader(np.arange(10), starts, 5)


def picture(path, size, colours, **options):
    """Left half of one colour, right half of another."""
    width, height = size
    image = Image.new("RGB", size, colours[0])
    image.paste(colours[1], (width // 2, 0, width, height))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


class TestImageFolder:
    @pytest.fixture
    def root(self, tmp_path):
        picture(tmp_path / "dog/b.PNG", (40, 20), ((255, 0, 0), (0, 0, 255)))
        picture(tmp_path / "dog/a.png", (20, 40), ((255, 0, 0), (0, 0, 255)))
        picture(tmp_path / "cat/deep/c.jpg", (32, 32), ((0, 255, 0), (9, 9, 9)), quality=95)
        (tmp_path / "cat/readme.txt").write_text("no image")
        (tmp_path / "cat/.hidden.png").write_text("no image")
        (tmp_path / ".cache").mkdir()
        return tmp_path

    @pytest.mark.parametrize("place", PLACES)
    def test_images_come_in_one_size_with_the_label_of_their_folder(self, root, place):
        loader = ImageFolder(root, (16, 12))
        assert loader.classes == ("cat", "dog")
        assert loader.paths == ["cat/deep/c.jpg", "dog/a.png", "dog/b.PNG"]
        (batch,) = epoch(loader, loader.group(3), **place)
        assert list(batch.data) == loader.paths
        assert batch.arrays["label"].tolist() == [0, 1, 1]
        images = np.asarray(batch.arrays["image"])
        assert images.shape == (3, 16, 12, 3)
        assert images.dtype == np.uint8
        for image in images[1:]:
            # The middle of the image: half and half, whatever its own proportions.
            assert (image[:, :4] == (255, 0, 0)).all()
            assert (image[:, -4:] == (0, 0, 255)).all()
        assert images[0, 2, 2, 1] > 240

    def test_representation_mode_and_dtype_can_be_chosen(self, root):
        loader = ImageFolder(root, 8, mode="L", coefs=Coefs.FRACTIONAL, dtype=np.float16)
        (batch,) = epoch(loader, loader.group(3))
        assert batch.arrays["image"].shape == (3, 8, 8, 1)
        assert batch.arrays["image"].dtype == np.float16
        assert 0 <= batch.arrays["image"].min() < batch.arrays["image"].max() <= 1
        assert ImageFolder(root, 8, coefs=Coefs.FRACTIONAL).loader_arrays["image"][1] == np.float32

    def test_augmentation_follows_from_the_seed_and_spares_validation(self, root):
        loader = ImageFolder(root, 16, augment=True)
        plain = ImageFolder(root, 16)
        items = [1] * 40  # the same image with 40 seeds
        options = {"validation": ("epoch", 1, loader.group(1, items=[1]))}
        *training, validation = epoch(loader, loader.group(40, items=items), **options)
        images = np.asarray(training[0].arrays["image"])
        assert len({image.tobytes() for image in images}) > 30
        red_is_left = (images[:, 8, 0, 0] > 128) & (images[:, 8, -1, 2] > 128)
        red_is_right = (images[:, 8, -1, 0] > 128) & (images[:, 8, 0, 2] > 128)
        assert red_is_left.any()
        assert red_is_right.any()
        again = epoch(loader, loader.group(40, items=items), loader_count=2, **options)
        np.testing.assert_array_equal(images, again[0].arrays["image"])
        (expected,) = epoch(plain, plain.group(1, items=[1]))
        np.testing.assert_array_equal(
            validation.arrays["image"], np.asarray(expected.arrays["image"])
        )

    def test_parts_of_images_of_any_size_lie_within_them(self, tmp_path):
        for number, size in enumerate([(1, 1), (1, 300), (300, 1), (7, 5), (2, 90)]):
            picture(tmp_path / f"c/{number}.png", size, ((50, 60, 70), (50, 60, 70)))
        loader = ImageFolder(tmp_path, (5, 9), augment=True)
        for batch in epoch(loader, loader.group(5), end_at=("epoch", 40)):
            assert (np.asarray(batch.arrays["image"]) == (50, 60, 70)).all()

    def test_labels_of_training_hold_for_validation(self, root, tmp_path_factory):
        other = tmp_path_factory.mktemp("validation")
        picture(other / "dog/x.png", (9, 9), ((1, 2, 3), (4, 5, 6)))
        train = ImageFolder(root, 8)
        loader = ImageFolder(other, 8, classes=train.classes)
        assert epoch(loader, loader.group(1))[0].arrays["label"].tolist() == [1]
        with pytest.raises(ValueError, match=r"class 'cat' in .* is none of classes"):
            ImageFolder(root, 8, classes=["dog"])

    def test_folders_without_images_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="holds no folders"):
            ImageFolder(tmp_path, 8)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"'empty' in .* holds no images"):
            ImageFolder(tmp_path, 8)
        with pytest.raises(FileNotFoundError):
            ImageFolder(tmp_path / "missing", 8)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"size": (1, 2, 3)}, ValueError, r"size is \(1, 2, 3\); expected \(height, width\)"),
            ({"size": "8"}, TypeError, "the height of size is '8'"),
            ({"classes": "cat"}, ValueError, "classes is 'cat'; expected names"),
            ({"classes": ["cat", "dog", "cat"]}, ValueError, "expected names, each once"),
            ({"coefs": Coefs.FRACTIONAL, "dtype": np.uint8}, TypeError, "coefs give fractions"),
            ({"coefs": Coefs.IMAGENET_SRGB, "mode": "L"}, ValueError, "coefs are for 3 channels"),
            ({"mode": "CMYK"}, ValueError, "mode is 'CMYK'"),
        ],
    )
    def test_what_cannot_be_is_refused_when_the_loader_is_made(self, root, options, error, words):
        with pytest.raises(error, match=words):
            ImageFolder(root, **({"size": 8} | options))

    @pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
    def test_files_of_all_modes_go_into_one_batch(self, tmp_path, mode):
        whole = np.random.default_rng(0).integers(0, 256, (24, 30, 3), np.uint8)
        (tmp_path / "c").mkdir()
        for number, kind in enumerate(("RGB", "L", "LA", "RGBA", "P", "1", "CMYK")):
            name = f"c/{number}.tif" if kind == "CMYK" else f"c/{number}.png"
            Image.fromarray(whole).convert(kind).save(tmp_path / name)
        Image.fromarray(whole[:, :, 0].astype(np.uint16) * 257).save(tmp_path / "c/7.png")
        (batch,) = epoch(loader := ImageFolder(tmp_path, 12, mode=mode), loader.group(8))
        images = np.asarray(batch.arrays["image"])
        assert images.shape == (8, 12, 12, len(mode))
        colours = images[..., :3].reshape(8, -1).mean(axis=1)
        assert (np.abs(colours - 127) < 6).all()
        if mode == "RGBA":
            assert (images[..., 3] == 255).all()

    def test_broken_images_can_be_skipped(self, root):
        (root / "cat/broken.jpg").write_bytes((root / "cat/deep/c.jpg").read_bytes()[:300])
        (root / "dog/empty.png").touch()
        (root / "dog/._a.png").write_bytes(b"a file of another system beside the image")
        loader = ImageFolder(root, 8)
        assert loader.paths == [
            *("cat/broken.jpg", "cat/deep/c.jpg", "dog/a.png", "dog/b.PNG", "dog/empty.png")
        ]
        (batch,) = epoch(loader, loader.group(5), on_error="skip_item")
        assert batch.mask.tolist() == [False, True, True, True, False]
        causes = [error.__cause__ for error in batch.skipped.values()]
        assert len(causes) == 2
        assert all(isinstance(cause, ImageError) for cause in causes)

    def test_an_image_that_cannot_be_read_is_an_error_that_names_it(self, root):
        (root / "cat/broken.jpg").write_bytes(b"not at all")
        loader = ImageFolder(root, 8)
        with pytest.raises(LoaderError, match=r"broken\.jpg") as caught:
            epoch(loader, loader.group(1), loader_count=1)
        assert caught.value.descriptor == "cat/broken.jpg"
        assert isinstance(caught.value.__cause__, ImageError)


class TestParquetLoader:
    @pytest.fixture
    def table(self, rng):
        count = 1000
        return pa.table(
            {
                "id": np.arange(count, dtype=np.int32),
                "x": rng.normal(size=count),
                "small": rng.integers(-5, 5, count, np.int8),
                "half": rng.normal(size=count).astype(np.float16),
                "flag": rng.integers(0, 2, count).astype(bool),
                "vector": pa.FixedSizeListArray.from_arrays(rng.normal(size=3 * count), 3),
                "name": [None if i % 9 == 0 else f"row {i}" for i in range(count)],
                "kind": pa.array([f"kind {i % 3}" for i in range(count)]).dictionary_encode(),
                "raw": [bytes([i % 256]) * 2 for i in range(count)],
            }
        )

    @pytest.fixture
    def paths(self, tmp_path, table):
        paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
        pq.write_table(table[:370], paths[0], row_group_size=100)
        pq.write_table(table[370:], paths[1], row_group_size=64)
        return paths

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("keep_nbytes", [0, 2**28])
    def test_rows_arrive_with_their_text(self, paths, table, place, keep_nbytes):
        loader = ParquetLoader(paths, keep_nbytes=keep_nbytes)
        assert len(loader) == 1000
        group = loader.group(64, shuffle_first=True, remainder="short")
        batches = epoch(loader, group, **place)
        for name in ("id", "x", "small", "half", "flag", "vector"):
            rows = table_of(batches, name)
            assert sorted(rows) == list(range(1000))
            column = table[name].combine_chunks()
            expected = (
                column.flatten().to_numpy().reshape(-1, 3)
                if name == "vector"
                else column.to_numpy(zero_copy_only=False)
            )
            got = np.stack([rows[i] for i in range(1000)])
            np.testing.assert_array_equal(got, expected.astype(got.dtype))
        for name in ("name", "kind", "raw"):
            expected = table[name].to_pylist()
            for batch in batches:
                assert batch.additional[name] == [expected[i] for i in batch.indices]

    def test_columns_can_be_chosen(self, paths):
        loader = ParquetLoader(paths[0], columns=["x"])
        assert len(loader) == 370
        batch = epoch(loader)[0]
        assert list(batch.arrays) == ["x"]
        assert not batch.additional

    def test_what_was_opened_before_the_fork_is_not_used_after_it(self, paths, table):
        pq.read_table(paths[0])  # pyarrow's own threads are up
        loader = ParquetLoader(paths)
        loader(np.array([1, 2]), {"id": np.empty(2, np.int32)}, None)
        rows = table_of(epoch(loader, loader.group(8), loader_count=2), "id")
        assert all(int(value) == index for index, value in rows.items())

    @pytest.mark.parametrize(
        ("column", "words"),
        [
            (pa.array([[1], [2, 3]]), "column 'c' is list<"),
            (pa.array([0, 1], pa.timestamp("s")), r"column 'c' is timestamp\["),
            (pa.array([1, 2], pa.decimal128(5)), "column 'c' is decimal128"),
            (pa.nulls(2), "column 'c' is null"),
        ],
    )
    def test_columns_that_cannot_be_loaded_are_refused_by_name(self, tmp_path, column, words):
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"c": column, "x": [1, 2]}), path)
        with pytest.raises(TypeError, match=words):
            ParquetLoader(path)
        assert len(ParquetLoader(path, columns=["x"])) == 2

    @pytest.mark.parametrize(
        "column", [pa.array([1, None]), pa.array([[1, 2], None], pa.list_(pa.int32(), 2))]
    )
    def test_a_null_among_numbers_is_an_error_rather_than_a_number(self, tmp_path, column):
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table({"c": column}), path)
        loader = ParquetLoader(path)
        with pytest.raises(
            LoaderError, match=r"column 'c' in row group 0 of .*t.parquet has nulls"
        ):
            epoch(loader)

    def test_files_that_do_not_go_together_are_refused(self, tmp_path, paths):
        other = tmp_path / "other.parquet"
        pq.write_table(pa.table({"id": [1.5]}), other)
        with pytest.raises(ValueError, match=r"'id' is double in .*other\.parquet, and int32 in"):
            ParquetLoader([paths[0], other], columns=["id"])
        with pytest.raises(
            ValueError, match=r"other\.parquet has the columns \['id'\], and .*small"
        ):
            ParquetLoader([paths[0], other])
        with pytest.raises(TypeError, match="columns is 'id'; expected a list of names"):
            ParquetLoader(other, columns="id")
        with pytest.raises(KeyError, match="no column 'x'"):
            ParquetLoader(other, columns=["x"])
        pq.write_table(pa.table({"id": pa.array([], pa.int32())}), other)
        with pytest.raises(ValueError, match="no rows"):
            ParquetLoader(other)
        with pytest.raises(ValueError, match="no paths"):
            ParquetLoader([])

    def test_files_may_have_their_columns_in_another_order_and_text_in_another_type(self, tmp_path):
        one, other = tmp_path / "1.parquet", tmp_path / "2.parquet"
        pq.write_table(pa.table({"a": [1], "b": [2.5], "t": pa.array(["x"], pa.string())}), one)
        text = pa.array(["y", "z"], pa.large_string())
        pq.write_table(pa.table({"t": text, "b": [3.5, 4.5], "a": [7, 8]}), other)
        (batch,) = epoch(loader := ParquetLoader([one, other]), loader.group(3))
        assert list(batch.arrays) == ["a", "b"]
        assert batch.arrays["a"].tolist() == [1, 7, 8]
        assert batch.arrays["b"].tolist() == [2.5, 3.5, 4.5]
        assert batch.additional["t"] == ["x", "y", "z"]

    def test_a_file_that_cannot_be_read_is_named_with_a_row_of_it(self, tmp_path, paths):
        bad = tmp_path / "bad.parquet"
        bad.write_bytes(b"PAR1 and no more")
        with pytest.raises(ValueError, match=r"bad\.parquet is no Parquet file: "):
            ParquetLoader([paths[0], bad])
        content = bytearray(paths[1].read_bytes())
        offset = pq.read_metadata(paths[1]).row_group(2).column(0).data_page_offset
        content[offset : offset + 64] = b"\xff" * 64
        bad.write_bytes(content)
        loader = ParquetLoader([paths[0], bad], columns=["id"])
        with pytest.raises(LoaderError, match=r"in row group 2 of .*bad\.parquet: ") as caught:
            epoch(loader, loader.group(1000))
        assert caught.value.index == 370 + 2 * 64
        with pytest.raises(ValueError, match="has several columns 'x'"):
            pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]), bad)
            ParquetLoader(bad)


def test_arrays_and_tokens_need_neither_pillow_nor_pyarrow():
    code = (
        "import sys; sys.modules['PIL'] = sys.modules['pyarrow'] = None\n"
        "from hydrax.loaders import ArrayLoader, TokenLoader\n"
        "import hydrax.loaders\n"
        "for name in ('ImageFolder', 'ParquetLoader'):\n"
        "    try: getattr(hydrax.loaders, name)\n"
        "    except ImportError as error: print(error)\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "hydrax[image]" in done.stdout
    assert "hydrax[parquet]" in done.stdout
