import numpy as np
import pytest
import torch

from fednas_flwr.data.records import Records, record_ids

from ..data_sets import read


@pytest.fixture(scope="session")
def images():
    """600 made 3x8x8 images of ten unequal classes."""
    rng = np.random.default_rng(0)
    features = rng.integers(0, 256, (600, 3, 8, 8), dtype=np.uint8)
    labels = rng.choice(10, 600, p=np.arange(1, 11) / 55)
    return Records(
        features=torch.from_numpy(features),
        labels=torch.from_numpy(labels),
        ids=record_ids(image.tobytes() for image in features),
        class_names=tuple("abcdefghij"),
        columns={"hospital": np.array(["north", "south", "east"])[labels % 3]},
    )


@pytest.fixture
def table_csv(tmp_path):
    path = tmp_path / "patients.csv"
    path.write_text(
        "patient,age,smokes,pressure,site,ill\n"
        "p1,50,yes,1.5,A,0\n"
        "p2,60,no,,B,1\n"
        "p1,70,,2.5,A,1\n"
        "p3,40,yes,3.5,B,0\n"
    )
    return path


@pytest.fixture
def table_of(tmp_path):
    """``table_of(text, **settings)``: the records of a CSV file."""

    def made(text, **settings):
        (tmp_path / "t.csv").write_text(text)
        return read("csv", tmp_path / "t.csv", **settings)[0]

    return made


def save_dicom(path, pixels, **tags):
    """Save an image of 16 bits as DICOM, unless tags say otherwise."""
    pydicom = pytest.importorskip("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    scan = pydicom.dataset.FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    usual = {"Rows": pixels.shape[0], "Columns": pixels.shape[1], "SamplesPerPixel": 1}
    usual |= {"PhotometricInterpretation": "MONOCHROME2", "PixelRepresentation": 0}
    usual |= {"BitsAllocated": 16, "BitsStored": 16, "HighBit": 15, "PixelData": pixels.tobytes()}
    for name, value in (usual | tags).items():
        setattr(scan, name, value)
    pydicom.dcmwrite(path, scan)
