import pytest

from fednas_flwr.report.templates import count, duration, mean_and_deviation, num_bytes, percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, "–"), (0, "0"), (9_999, "9999"), (12_345, "12.3 k"), (3_349_000, "3.35 M")],
        *[(999_499, "999 k"), (999_500, "1 M"), (-999_500, "-1 M"), (999_600_000, "1 G")],
        *[(9.996e11, "1 T"), (9.996e14, "1000 T"), (5e15, "5000 T")],
    ],
)
def test_count(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.24, "8.2 s"), (59.96, "1:00 min"), (185, "3:05 min"), (3599.6, "1:00 h"), (7800, "2:10 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_percent_and_bytes():
    assert (percent(0.9144), percent(None)) == ("91.4 %", "–")
    assert (num_bytes(512), num_bytes(7_720_000), num_bytes(None)) == ("512 B", "7.72 MB", "–")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "–"),
        ([0.5], "0.500"),
        ([1.0, 3.0], "2.00 ± 1.41"),
        ([1e6, 1e6], "1000000 ± 0"),
        ([0], "0"),
    ],
)
def test_mean_and_deviation(values, text):
    assert mean_and_deviation(values) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(999, "999 B"), (1_000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB")],
        *[(999_600_000, "1 GB"), (9.996e11, "1 TB"), (5e15, "5000 TB")],
    ],
)
def test_bytes_are_carried_to_the_next_unit(value, text):
    assert num_bytes(value) == text
