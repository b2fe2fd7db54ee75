import pytest

from fednas_flwr.report.templates import count, duration, mean_and_deviation, num_bytes, percent

SHOWN = {
    count: {
        *((None, "–"), (0, "0"), (9_999, "9999"), (12_345, "12.3 k"), (3_349_000, "3.35 M")),
        *((999_499, "999 k"), (999_500, "1 M"), (-999_500, "-1 M"), (999_600_000, "1 G")),
        *((9.996e11, "1 T"), (9.996e14, "1000 T"), (5e15, "5000 T")),
    },
    num_bytes: {
        *((None, "–"), (512, "512 B"), (7_720_000, "7.72 MB"), (999, "999 B"), (1_000, "1 kB")),
        *((999_499, "999 kB"), (999_500, "1 MB"), (999_600_000, "1 GB"), (9.996e11, "1 TB")),
        (5e15, "5000 TB"),
    },
    duration: {
        *((8.24, "8.2 s"), (59.96, "1:00 min"), (185, "3:05 min")),
        *((3599.6, "1:00 h"), (7800, "2:10 h")),
    },
    percent: {(0.9144, "91.4 %"), (None, "–")},
    mean_and_deviation: {
        *(((), "–"), ((0.5,), "0.500"), ((1.0, 3.0), "2.00 ± 1.41")),
        *(((1e6, 1e6), "1000000 ± 0"), ((0,), "0")),
    },
}


@pytest.mark.parametrize("shown", SHOWN)
def test_numbers_with_their_units(shown):
    assert {(value, shown(value)) for value, _ in SHOWN[shown]} == SHOWN[shown]
