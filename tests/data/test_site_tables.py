"""Tables of sites are joined by what they mean, and compared side by side."""

from pathlib import Path

import pytest

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import CATEGORY, Column, Records
from fednas_flwr.data.site_tables import (
    SITES_FILE,
    as_yaml,
    difference,
    join_tables,
    proposals,
    read_site_tables,
    side_by_side,
)

A = "age,sex,chol,y\n50,TRUE,200,0\n60,FALSE,250.5,1\n40,TRUE,190,1\n"


def join(root: Path, **settings: object) -> Records:
    csv = data_settings("csv", {"cache": "none", **settings})
    return join_tables(read_site_tables(csv, root), csv, root)


def write(root: Path, **sites: str) -> None:
    for site, text in sites.items():
        (root / f"{site}.csv").write_text(text)


SAME = {
    "as it is": A,
    "other order": "chol,y,age,sex\n200,0,50,TRUE\n250.5,1,60,FALSE\n190,1,40,TRUE\n",
    "floats": "age,sex,chol,y\n50.0,True,200.0,0.0\n60.0,False,250.5,1.0\n40.0,True,190.0,1.0\n",
    "German": "age;sex;chol;y\n50;true;200,0;0\n60;false;250,5;1\n40;true;190,0;1\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_sites_that_mean_the_same_are_joined(tmp_path: Path, text: str) -> None:
    write(tmp_path, a=A, b=text)
    joined = join(tmp_path, label="y")
    assert joined.feature_names == ("age", "chol", "sex=FALSE", "sex=TRUE")
    assert joined.class_names == ("0", "1")
    assert joined.columns["site"].tolist() == ["a"] * 3 + ["b"] * 3
    assert joined.features[:3].tolist() == joined.features[3:].tolist()
    assert joined.labels.tolist() == [0, 1, 1] * 2


def test_a_column_that_a_site_lacks_is_missing_there_and_told(tmp_path: Path) -> None:
    write(tmp_path, a=A, b="age,sex,y\n50,TRUE,1\n")
    joined = join(tmp_path)
    assert joined.features[3, 1].isnan()
    assert "b: no column chol, which counts as missing there" in joined.notes
    assert joined.class_names == ("0", "1")  # though b has one class only
    write(tmp_path, b="age,sex,chol\n50,TRUE,1\n")
    with pytest.raises(ConfigError, match="last column of site a is y, and that of site b chol"):
        join(tmp_path)
    with pytest.raises(ConfigError, match="no column y"):
        join(tmp_path, label="y")


def test_sites_are_adapted_by_their_file(tmp_path: Path) -> None:
    write(tmp_path, a=A, b="age;Sex;cholesterol;y\n50;M;5,172;0\n60;F;?;1\n40;M;-9;1\n")
    (tmp_path / SITES_FILE).write_text(
        "all: {missing_values: [-9]}\n"
        "b:\n  rename: {cholesterol: chol, Sex: sex}\n  map: {sex: {M: true, F: false}}\n"
        "  scale: {chol: 38.67}\n  decimal: comma\n  missing_in: {chol: ['?', -9]}\n"
    )
    joined = join(tmp_path)
    assert joined.feature_names == ("age", "chol", "sex=FALSE", "sex=TRUE")
    assert joined.features[3].tolist() == pytest.approx([50, 5.172 * 38.67, 0, 1])
    assert joined.features[4:, 1].isnan().all()
    (tmp_path / SITES_FILE).write_text("c: {rename: {a: b}}\n")
    with pytest.raises(ConfigError, match="site=c is unknown: choose one of a, all, b"):
        join(tmp_path)
    (tmp_path / SITES_FILE).write_text("b: {renam: {a: b}}\n")
    with pytest.raises(ConfigError, match="b: setting=renam is unknown.*rename"):
        join(tmp_path)


def test_what_sites_agree_on_is_kept_with_their_records(tmp_path: Path) -> None:
    write(tmp_path, a="50;1\n60;2\n?;0\n", b="50;1\n60;2\n-9;0\n")
    (tmp_path / SITES_FILE).write_text(
        "all: {column_names: [age, y], map: {y: {2: 1}}, missing_values: ['?']}\n"
        "b: {missing_values: ['?', -9]}\n"
    )
    joined = join(tmp_path)
    assert joined.class_names == ("0", "1")
    assert joined.form.column_names == ["age", "y"]
    assert joined.form.map == {"y": {"2": "1"}}
    assert joined.form.decimal == "point"
    assert joined.form.missing_values == []  # in which they differ


def test_what_would_join_sites_is_proposed(tmp_path: Path) -> None:
    rows = "".join(f"{50 + i},{'MF'[i % 2]},{4 + i / 10},{i % 2}\n" for i in range(9))
    ours = "".join(f"{50 + i},{i % 2},{160 + i},{i % 2}\n" for i in range(9))
    zero = "".join(f"{50 + i},{i % 2},{0 if i % 3 else 165},{i % 2}\n" for i in range(9))
    header = "age,sex,chol,y\n"
    theirs = "age,sex,cholesterol,y\n"
    write(tmp_path, a=header + ours, b=header + ours, c=theirs + rows, d=header + zero)
    tables = read_site_tables(data_settings("csv", {"cache": "none"}), tmp_path)
    found = proposals(tables)
    assert found == {
        "c": {"rename": {"cholesterol": "chol"}, "map": {"sex": {"F": "?", "M": "?"}}},
        "d": {"missing_in": {"chol": ["0"]}},
    }
    (tmp_path / SITES_FILE).write_text(
        "\n".join(as_yaml({"c": {"rename": {"cholesterol": "chol"}}}))
    )
    tables = read_site_tables(data_settings("csv", {"cache": "none"}), tmp_path)
    assert proposals(tables)["c"]["scale"] == {"chol": 38.67}
    rows_shown = side_by_side(tables)
    assert rows_shown[0] == ("", "a", "b", "c", "d")
    assert dict((row[0], row[1:]) for row in rows_shown)["records"] == ("9",) * 4
    assert ("sex", "0 to 1, median 0", "0 to 1, median 0", "F, M", "0 to 1, median 0") in rows_shown


AGE, CHOL, SEX = Column("age"), Column("chol"), Column("sex", CATEGORY, ("F", "M"))
DIFFERENT = {
    "spelled": (
        (AGE, Column("cholesterol"), Column("sex", CATEGORY, ("female", "male"))),
        "it lacks chol; it has cholesterol besides; sex has female, male there and F, M at the "
        "others; lines of its dataset.yaml that would join it, to be checked: rename: "
        '{"cholesterol": "chol"}, map: {"sex": {"female": "F", "male": "M"}}',
    ),
    "a kind": (
        (AGE, Column("chol", CATEGORY, ("high", "low")), SEX),
        "chol is a category there and a number at the others",
    ),
    "a category more": (
        (AGE, CHOL, Column("sex", CATEGORY, ("F", "M", "U"))),
        "sex has F, M, U there and F, M at the others; lines of its dataset.yaml that would join "
        'it, to be checked: categories: {"sex": ["F", "M", "U"]}',
    ),
    "order": ((CHOL, AGE, SEX), "their order must be age, chol, sex"),
}


@pytest.mark.parametrize(("own", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_would_join_a_real_site_is_told(own: tuple[Column, ...], expected: str) -> None:
    assert difference(own, (AGE, CHOL, SEX)) == expected
