"""Tables of sites are joined by what they mean, and compared side by side."""

import pandas as pd
import pytest

from fednas_flwr.data import site_tables
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import CATEGORY, Column
from fednas_flwr.data.table_files import SITES_FILE

from ..refusals import refuses

A = "age,sex,chol,y\n50,TRUE,200,0\n60,FALSE,250.5,1\n40,TRUE,190,1\n"


def tables_of(root):
    return site_tables.read_site_tables(data_settings("csv", {"cache": "none"}), root)


def join(root, **settings):
    csv = data_settings("csv", {"cache": "none", **settings})
    return site_tables.join_tables(site_tables.read_site_tables(csv, root), csv, root)


def write(root, **sites):
    for site, text in sites.items():
        (root / f"{site}.csv").write_text(text)


SAME = {
    "as it is": A,
    "other order": "chol,y,age,sex\n200,0,50,TRUE\n250.5,1,60,FALSE\n190,1,40,TRUE\n",
    "floats": "age,sex,chol,y\n50.0,True,200.0,0.0\n60.0,False,250.5,1.0\n40.0,True,190.0,1.0\n",
    "German": "age;sex;chol;y\n50;true;200,0;0\n60;false;250,5;1\n40;true;190,0;1\n",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_sites_that_mean_the_same_are_joined(tmp_path, text):
    write(tmp_path, a=A, b=text)
    joined = join(tmp_path, label="y")
    names = ("age", "chol", "sex=FALSE", "sex=TRUE")
    assert (joined.feature_names, joined.class_names) == (names, ("0", "1"))
    assert joined.columns["site"].tolist() == ["a"] * 3 + ["b"] * 3
    assert joined.features[:3].tolist() == joined.features[3:].tolist()
    assert joined.labels.tolist() == [0, 1, 1] * 2


def test_a_column_that_a_site_lacks_is_missing_there_and_told(tmp_path):
    write(tmp_path, a=A, b="age,sex,y\n50,TRUE,1\n")
    (tmp_path / "c.txt").write_text(A)
    joined = join(tmp_path)
    assert joined.notes[0] == f"c.txt in {tmp_path} left out: expected .csv, .xlsx and the like"
    assert joined.features[3, 1].isnan()
    assert "b: no column chol, which counts as missing there" in joined.notes
    assert joined.class_names == ("0", "1")  # though b has one class only
    write(tmp_path, b="age,sex,chol\n50,TRUE,1\n")
    refuses("last column of site a is y, and that of site b chol", join, tmp_path)
    refuses("no column y", join, tmp_path, label="y")


def test_sites_are_adapted_by_their_file(tmp_path):
    write(tmp_path, a=A, b="age;Sex;cholesterol;y\n50;M;5,172;0\n60;F;?;1\n40;M;-9;1\n")
    (tmp_path / SITES_FILE).write_text(
        "all: {missing_values: [-9]}\n"
        "b:\n  rename: {cholesterol: chol, Sex: sex}\n  map: {sex: {M: true, F: false, X: 1}}\n"
        "  scale: {chol: 38.67}\n  decimal: comma\n  missing_in: {chol: ['?', -9]}\n"
    )
    joined = join(tmp_path)
    assert joined.feature_names == ("age", "chol", "sex=FALSE", "sex=TRUE")
    assert joined.features[3].tolist() == pytest.approx([50, 5.172 * 38.67, 0, 1])
    assert joined.features[4:, 1].isnan().all()
    assert "dataset.map.sex names X, which no cell is" in joined.notes
    for text, words in (
        ("c: {rename: {a: b}}\n", "site=c is unknown: choose one of a, all, b"),
        ("b: {renam: {a: b}}\n", "b: setting=renam is unknown.*rename"),
        ("- b\n", "all=.* must be a group of settings"),
    ):
        (tmp_path / SITES_FILE).write_text(text)
        refuses(words, join, tmp_path)


def test_what_sites_agree_on_is_kept_with_their_records(tmp_path):
    (tmp_path / "1.CSV").write_text("50;1\n60;2\n?;0\n")
    write(tmp_path, b="50;1\n60;2\n-9;0\n")
    (tmp_path / SITES_FILE).write_text(
        "all: {column_names: [age, y], map: {y: {2: 1}}, missing_values: ['?']}\n"
        "b: {missing_values: ['?', -9]}\n1: {decimal: point}\n"
    )
    joined = join(tmp_path)
    assert (joined.class_names, {*joined.columns["site"]}) == (("0", "1"), {"1", "b"})
    shared = {"column_names": ["age", "y"], "map": {"y": {"2": "1"}}, "decimal": "point"}
    shared |= {"missing_values": []}  # in which they differ
    assert shared.items() <= vars(joined.form).items()


def test_what_would_join_sites_is_proposed(tmp_path):
    rows = "".join(f"{50 + i},{'MF'[i % 2]},{4.2 + i / 100},{i % 2}\n" for i in range(9))
    ours = "".join(f"{50 + i},{i % 2},{160 + i},{i % 2}\n" for i in range(9))
    zero = "".join(f"{50 + i},{i % 2},{0 if i % 3 else 165},{i % 2}\n" for i in range(9))
    header, theirs = "age,sex,chol,y\n", "age,sex,cholesterol,y\n"
    write(tmp_path, a=header + ours, b=header + ours, c=theirs + rows, d=header + zero)
    assert site_tables.proposals(tables_of(tmp_path)) == {
        "c": {"rename": {"cholesterol": "chol"}, "map": {"sex": {"F": "?", "M": "?"}}},
        "d": {"missing_in": {"chol": ["0"]}},
    }
    lines = site_tables.as_yaml({"c": {"rename": {"cholesterol": "chol"}}})
    (tmp_path / SITES_FILE).write_text("\n".join(lines))
    tables = tables_of(tmp_path)
    assert site_tables.proposals(tables)["c"]["scale"] == {"chol": 38.67}
    rows_shown = site_tables.side_by_side(tables)
    assert rows_shown[0] == ("", "a", "b", "c", "d")
    assert dict((row[0], row[1:]) for row in rows_shown)["records"] == ("9",) * 4
    assert ("sex", "0 to 1, median 0", "0 to 1, median 0", "F, M", "0 to 1, median 0") in rows_shown


def test_sites_that_say_yes_in_other_words_are_asked_to_join(tmp_path):
    write(tmp_path, a=A, b="age,sex,chol,y\n50,TRUE,200,no\n60,FALSE,250.5,Yes\n")
    line = refuses("join them by", join, tmp_path).split(" with ")[1].rstrip(".")
    (tmp_path / SITES_FILE).write_text(line)
    assert join(tmp_path).labels.tolist() == [0, 1, 1, 0, 1]


AGE, CHOL, SEX = Column("age"), Column("chol"), Column("sex", CATEGORY, ("F", "M"))
FLAGGED = Column("chol", indicator=True)
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
    "a rule": ((AGE, FLAGGED, SEX), "chol has missing=indicator there alone"),
    "order": ((CHOL, AGE, SEX), "their order must be age, chol, sex"),
}


@pytest.mark.parametrize(("own", "expected"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_would_join_a_real_site_is_told(own, expected):
    assert site_tables.difference(own, (AGE, CHOL, SEX)) == expected


def dated(order):
    days = pd.date_range("2024-01-01", periods=40, freq="3D")
    rows = zip(days.strftime(order), range(40), strict=True)
    return "seen,age,y\n" + "".join(f"{day},{50 + i % 9},{i % 2}\n" for day, i in rows)


@pytest.mark.parametrize("other", ["%m/%d/%Y", "%Y-%m-%d", "%d.%m.%Y"])
def test_sites_may_write_dates_in_their_own_order(tmp_path, other):
    write(tmp_path, a=dated("%d/%m/%Y"), b=dated(other))
    joined = join(tmp_path)
    assert joined.feature_names == ("seen", "age")
    assert joined.features[:40].tolist() == joined.features[40:].tolist()
    assert joined.ids[:40].tolist() == joined.ids[40:].tolist()


def test_several_labels_may_be_words_at_one_site_and_numbers_at_another(tmp_path):
    write(tmp_path, a="age,p,q\n50,0,1\n60,1,0\n", b="age,p,q\n55,no,yes\n61,yes,no\n")
    assert join(tmp_path, labels=["p", "q"]).labels.tolist() == [[0, 1], [1, 0]] * 2


def test_codes_counted_from_one_are_joined_to_those_of_most_sites(tmp_path):
    counted = "age,sex,y\n50,m,{}\n60,f,{}\n".format
    write(tmp_path, a=counted(1, 2), b=counted(0, 1), c=counted(0, 1))
    assert any(note.startswith("a: other names") for note in join(tmp_path).notes)


LEVEL, MASS = (lambda i: 170 + 3 * i), (lambda i: 60 + 2 * i)
TWO = {  # a column of the first site, that of the second, and what is proposed for the latter
    "millimoles": (LEVEL, lambda i: round(LEVEL(i) / 38.67, 2), {"scale": {"x": 38.67}}),
    "shares": (MASS, lambda i: MASS(i) / 100, {"scale": {"x": 100.0}}),
    "months": (MASS, lambda i: 12 * MASS(i), {"scale": {"x": 0.08333}}),
    "inches": (LEVEL, lambda i: round(LEVEL(i) / 2.54, 1), {"scale": {"x": 2.54}}),
    "pounds": (MASS, lambda i: round(2.2 * MASS(i)), {"scale": {"x": 0.4535}}),
    "Fahrenheit": (lambda i: 36.5 + i / 10, lambda i: 97.7 + i / 5, {"scale": {"x": "?"}}),
    "codes": (lambda i: i % 2, lambda i: 1.0 + i % 2, {"map": {"x": {"1.0": "0", "2.0": "1"}}}),
    "two codes": (lambda i: i % 2, lambda i: 2 * (i % 2), {"map": {"x": {"0": "0", "2": "1"}}}),
    "counts": (lambda i: i % 3, lambda i: i % 4, None),
    "zeros": (LEVEL, lambda i: 1.0 * LEVEL(i) * (i % 3 > 0), {"missing_in": {"x": ["0"]}}),
}


@pytest.mark.parametrize(("first", "second", "expected"), TWO.values(), ids=TWO)
def test_what_would_join_two_sites_is_proposed(tmp_path, first, second, expected):
    for site, cell in (("a", first), ("b", second)):
        write(tmp_path, **{site: "x,y\n" + "".join(f"{cell(i)},{i % 2}\n" for i in range(12))})
    found = site_tables.proposals(tables_of(tmp_path))
    assert found == ({"b": expected} if expected else {})
    (tmp_path / SITES_FILE).write_text("\n".join(site_tables.as_yaml(found)))
    if "?" in str(found):  # which somebody is to think about
        refuses("b.scale.x=. has the wrong type: expected a number", join, tmp_path)
    else:
        assert site_tables.proposals(tables_of(tmp_path)) == {}


SEEMINGLY_OTHER = [
    ("age,sex,y\n50,male,0\n60,female,1\n", True),
    ("Age,sex,y\n50,m,0\n60,f,1\n", True),  # of two sites the first has its way
    ("age,sex,y\n5000,m,0\n6000,f,1\n", True),
    ("age,sex,y\n50,m,1\n60,f,2\n", True),  # a class that is counted from 1
    ("age,sex,y\n55,m,0\n61,f,1\n", False),
    ("age,sex,y\n" + "".join(f"50,m,{i}.5\n" for i in range(11)), True),  # of another kind
]


@pytest.mark.parametrize(("text", "is_told"), SEEMINGLY_OTHER)
def test_that_a_site_seems_to_differ_is_told(tmp_path, text, is_told):
    write(tmp_path, a="age,sex,y\n50,m,0\n60,f,1\n", b=text)
    assert ("than most, it seems; fednas data" in "".join(join(tmp_path).notes)) is is_told
