from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data import loaders
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.loaders import Split, augment, epoch_batches, largest_feature, step_batch
from fednas_flwr.data.records import Column, record_ids

from ..data_sets import records_of

FRACTIONS = {"train": 0.5, "validation": 0.3, "test": 0.2}
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def client_data(records, indices, *, mean=MEAN, std=STD, fractions=FRACTIONS, **more):
    prepared, more = Prepared(records, None, mean, std), {"fractions": fractions, **more}
    return loaders.make_client_data(prepared, np.asarray(indices), key=b"site", **more)


def test_parts_are_disjoint_and_the_same_for_any_partition(images):
    whole = client_data(images, np.arange(600))
    parts = [set(split.rows.tolist()) for split in (whole.train, whole.validation, whole.test)]
    assert set.union(*parts) == set(range(600))
    assert sum(map(len, parts)) == 600
    odd = client_data(images, np.arange(1, 600, 2))
    assert set(odd.train.rows.tolist()) == {row for row in parts[0] if row % 2}
    assert len(odd.test) == len([row for row in parts[2] if row % 2])
    # no part copies the records
    assert odd.train.features.data_ptr() == images.features.data_ptr()


def test_a_batch_is_normalised_per_channel(images):
    split = client_data(images, np.arange(100, 200)).train
    indices = torch.tensor([3, 0, 3])
    x, y = split.batch(indices, "cpu")
    rows = split.rows[indices]
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(x, (images.features[rows] / 255 - mean) / std)
    assert x.dtype == torch.float32
    assert torch.equal(y, images.labels[rows])
    # bit-equal whatever else is in the batch
    alone, _ = split.batch(torch.tensor([0]), "cpu")
    assert torch.equal(alone[0], x[1])


def test_a_split_knows_the_records_of_each_person(images):
    persons = np.random.default_rng(2).integers(0, 90, 600)
    ids = record_ids(str(person).encode() for person in persons.tolist())
    data = client_data(replace(images, ids=ids, id_column="patient"), np.arange(0, 600, 2))
    held = [set(persons[s.rows].tolist()) for s in (data.train, data.validation, data.test)]
    assert sum(map(len, held)) == len(set.union(*held)) == len(set(persons[::2].tolist()))
    for split in (data.train, loaders.concat_splits(data.train, data.validation)):
        found = split.records_of(torch.arange(split.num_units))
        assert torch.cat(found).sort().values.tolist() == list(range(len(split)))
        owners = [set(persons[split.rows[indices].numpy()].tolist()) for indices in found]
        assert [len(owner) for owner in owners] == [1] * split.num_units
        assert len(set.union(*owners)) == split.num_units
        (last,) = split.records_of(torch.tensor([split.num_units - 1]))
        assert torch.equal(last, found[-1])
    alone = client_data(images, np.arange(600)).train
    assert alone.num_units == len(alone)
    assert [r.tolist() for r in alone.records_of(torch.tensor([4, 2]))] == [[4], [2]]
    nobody = torch.empty(0).long()
    assert replace(data.test, rows=nobody, persons=nobody).num_units == 0


def test_a_client_with_hardly_a_training_record(images):
    whole = client_data(images, np.arange(50))
    rows = torch.cat([whole.test.rows, whole.train.rows[:1]]).numpy()
    data = client_data(images, rows)
    assert sorted(data.train.rows.tolist()) == sorted(rows.tolist())
    assert len(data.validation) == len(data.test) == 0
    data = client_data(images, rows, trains=False)
    assert (len(data.train), len(data.test)) == (1, len(rows) - 1)
    data = client_data(images, rows, fractions={"train": 0, "validation": 0, "test": 1})
    assert (len(data.train), len(data.test)) == (0, len(rows))


@pytest.fixture
def table():
    """Two numeric columns with missing numbers, one constant, two one-hot; 400 rows."""
    rng = np.random.default_rng(0)
    columns = [rng.normal(50, 10, 400), rng.exponential(3, 400), np.full(400, 7.1)]
    columns += [rng.integers(0, 2, 400) for _ in range(2)]
    features = np.stack(columns, axis=1).astype(np.float32)
    features[rng.random(400) < 0.2, 1] = np.nan
    schema = (*(Column(name) for name in "abc"), Column("d", "category", ("0", "1")))
    return records_of(features, schema=schema)


def test_a_client_standardises_by_its_own_training_part(table):
    data = client_data(table, np.arange(0, 400, 2), mean=(), std=())
    raw = table.features[data.train.rows].double().numpy()
    expected_mean = [np.nanmean(raw[:, 0]), np.nanmean(raw[:, 1]), 7.1, 0, 0]
    assert data.train.mean == pytest.approx(expected_mean)
    assert data.train.std == pytest.approx([np.nanstd(raw[:, 0]), np.nanstd(raw[:, 1]), 1, 1, 1])
    x, _ = data.train.batch(torch.arange(len(data.train)), "cpu", limit=0)
    assert x[:, :2].mean(0).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert torch.equal(x[:, 3:], table.features[data.train.rows, 3:])
    assert x[:, 2].abs().max() < 1e-5
    assert (x[np.isnan(raw[:, 1]), 1] == 0).all()
    # the other parts, and no other client, have a say in it
    assert data.test.mean == data.validation.mean == data.train.mean
    table.features[data.test.rows] = 1e6
    table.features[1::2] = 1e6
    assert client_data(table, np.arange(0, 400, 2), mean=(), std=()).train.mean == data.train.mean


def test_a_batch_leaves_the_records_as_they_are(table):
    before = table.features.clone()
    loaders.server_split(table, (), ()).batch(torch.arange(400), "cpu")
    torch.testing.assert_close(table.features, before, equal_nan=True, rtol=0, atol=0)


@given(size=st.integers(1, 60), batch=st.integers(1, 70), seed=st.integers(0, 5))
def test_an_epoch_covers_all_examples_once(size, batch, seed):
    batches = list(epoch_batches(size, batch_size=batch, generator=make_generator(seed)))
    assert sorted(torch.cat(batches).tolist()) == list(range(size))
    assert [len(indices) for indices in batches[:-1]] == [batch] * (len(batches) - 1)
    assert len(batches[-1]) <= batch + 1
    assert len(batches[-1]) > 1 or 1 in (size, batch)  # batch norm needs two
    again = list(epoch_batches(size, batch_size=batch, generator=make_generator(seed)))
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


@given(size=st.integers(1, 60), batch=st.integers(1, 70), epoch=st.integers(0, 3))
def test_steps_go_through_shuffled_epochs(size, batch, epoch):
    per_epoch = len(list(epoch_batches(size, batch_size=batch, generator=make_generator(0))))
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    own = {"batch_size": batch, "seed": 1, "purpose": ("search", 2)}
    batches = [step_batch(size, step=step, **own) for step in steps]
    generator = make_generator(1, "search", 2, epoch)
    expected = list(epoch_batches(size, batch_size=batch, generator=generator))
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_a_full_batch_is_in_order_and_draws_nothing():
    generator = make_generator(0)
    before = generator.get_state()
    (whole,) = epoch_batches(4, batch_size=None, generator=generator)
    assert whole.tolist() == [0, 1, 2, 3]
    assert torch.equal(generator.get_state(), before)
    assert step_batch(3, batch_size=None, step=9, seed=0, purpose=()).tolist() == [0, 1, 2]


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="num_examples=0"):
        step_batch(0, batch_size=4, step=0, seed=0, purpose=())
    with pytest.raises(ValueError, match="batch_size=0"):
        next(epoch_batches(4, batch_size=0, generator=make_generator(0)))


def slow_augment(x, *, generator, crop_padding, flip, cutout):
    """One image after the other, with the same draws."""
    batch, _, height, width = x.shape

    def draw(stop):
        return torch.randint(stop, (batch, 1), generator=generator).flatten().tolist()

    flips = draw(2) if flip else [0] * batch
    tops = draw(2 * crop_padding + 1) if crop_padding else [0] * batch
    lefts = draw(2 * crop_padding + 1) if crop_padding else [0] * batch
    rows = draw(height) if cutout else [0] * batch
    columns = draw(width) if cutout else [0] * batch
    out = []
    for i in range(batch):
        image = torch.nn.functional.pad(x[i], (crop_padding,) * 4)
        image = image[:, tops[i] : tops[i] + height, lefts[i] : lefts[i] + width]
        image = (image.flip(2) if flips[i] else image).clone()
        top, left = rows[i] - cutout // 2, columns[i] - cutout // 2
        image[:, max(top, 0) : max(top + cutout, 0), max(left, 0) : max(left + cutout, 0)] = 0
        out.append(image)
    return torch.stack(out)


@given(
    shape=st.tuples(*[st.integers(1, 6)] * 2, *[st.integers(2, 9)] * 2),
    crop_padding=st.integers(0, 4),
    flip=st.booleans(),
    cutout=st.integers(0, 12),
    seed=st.integers(0, 100),
)
def test_augment_equals_one_image_after_the_other(shape, crop_padding, flip, cutout, seed):
    x = torch.randn(shape, generator=make_generator(seed, "x"))
    before = x.clone()
    sizes = {"crop_padding": crop_padding, "flip": flip, "cutout": cutout}
    fast = augment(x, generator=make_generator(seed), **sizes)
    assert torch.equal(fast, slow_augment(x, generator=make_generator(seed), **sizes))
    assert torch.equal(x, before)


def test_augment_skips_what_is_off():
    x, generator = torch.randn(2, 3), make_generator(0)
    before = generator.get_state()
    assert augment(x, generator=generator, crop_padding=0, flip=False, cutout=0) is x
    assert torch.equal(generator.get_state(), before)


@pytest.mark.gpu
def test_batches_and_augmentation_on_the_gpu(images):
    split = client_data(images, np.arange(600)).train
    indices = torch.arange(32)
    x, y = split.batch(indices, "cuda")
    assert x.is_cuda
    assert y.is_cuda
    on_cpu, _ = split.batch(indices, "cpu")
    torch.testing.assert_close(x.cpu(), on_cpu)
    sizes = {"crop_padding": 2, "flip": True, "cutout": 3}
    moved = augment(x, generator=make_generator(0), **sizes)
    assert torch.equal(moved.cpu(), augment(x.cpu(), generator=make_generator(0), **sizes))


def pairs(low, high, **form):
    return st.tuples(*[st.floats(low, high, **form)] * 2)


@given(st.lists(pairs(-1e6, 1e6, width=32), min_size=1), pairs(-5, 5), pairs(0.1, 9))
def test_the_largest_feature_is_that_of_all_normalised_ones(rows, mean, std):
    features = torch.tensor(rows)
    split = Split(features, torch.zeros(len(rows)).long(), torch.arange(len(rows)), mean, std)
    x, _ = split.batch(torch.arange(len(rows)), "cpu", limit=0)
    clipped, _ = split.batch(torch.arange(len(rows)), "cpu")
    assert torch.equal(clipped, x.clamp(-5, 5))
    column, value = largest_feature(split)
    assert value == float(x.abs().max())
    assert float(x[:, column].abs().max()) == value


def test_the_largest_feature_of_images_is_that_of_black_or_white(images):
    split = client_data(images, np.arange(10), mean=(0.5, 0.9, 0.5), std=(0.5, 0.1, 0.5)).train
    column, value = largest_feature(split)
    assert (column, value) == (1, pytest.approx(9.0))


def test_missing_numbers_are_no_large_features():
    features = torch.tensor([[torch.nan, 1.0], [torch.nan, -3.0]])
    split = Split(features, torch.zeros(2).long(), torch.arange(2), (0.0, 0.0), (1.0, 1.0))
    assert largest_feature(split) == (1, 3.0)
    assert largest_feature(replace(split, rows=torch.arange(0))) == (0, 0.0)
