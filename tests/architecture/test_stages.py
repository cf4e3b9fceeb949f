"""What the manifests of stages name is there, and the core finds it by these names."""

from securevfl.core.stages import load_part, stages
from securevfl.data.sources.pieces import FRAMES_OF_ROWS, SOURCES, TableSource
from securevfl.linkage.metrics.metric import Metric
from securevfl.linkage.protections.protection import Protection
from securevfl.linkage.stage.linkage_parts import METRICS, PROTECTIONS


def test_parts_of_linkage_have_the_names_of_their_manifests() -> None:
    """The federation file names them; a class stands for one instance."""
    assert {"euclidean", "exact", "mixed", "bloom"} <= set(METRICS)
    assert {"none", "psi", "hashes", "shares", "paillier"} <= set(PROTECTIONS)
    for parts, kind in ((METRICS, Metric), (PROTECTIONS, Protection)):
        assert len(parts) == len(list(parts))
        for name in parts:
            assert isinstance(parts[name], kind)
            assert parts[name].name == name
            assert parts[name] is parts[name]


def test_sources_are_readers_of_files() -> None:
    """By their suffixes, and one for addresses."""
    assert {".xlsx", ".duckdb", ".sqlite", "url"} <= set(SOURCES)
    assert all(isinstance(source, TableSource) for source in SOURCES.values())
    assert all(callable(read) for read in FRAMES_OF_ROWS.values())


def test_an_unknown_part_is_a_key_error() -> None:
    """As of any mapping; asking whether it is there loads nothing."""
    assert "nothing" not in METRICS
    assert METRICS.get("nothing") is None


def test_every_module_that_a_manifest_names_is_in_its_folder() -> None:
    for stage, manifest in stages().items():
        for kind in ("metrics", "protections", "sources", "rows"):
            for reference in getattr(manifest, kind).values():
                assert load_part(stage, reference) is not None
