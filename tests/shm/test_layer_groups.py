"""How layers are divided among KV pages, and page tables with the pages of several groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.arena import ArenaError
from shm.checkpoint import Hyper
from shm.layer_groups import LONG_TEXT, MAX_GROUPS, NO_PAGE, ONE_GROUP, LayerGroups, divide_layers, places_of_layers
from shm.pages import KvGeometry, pack_ordinal, unpack_ordinal
from shm.prefix_hash import PageHash, group_hash, root_hash

some_groups = st.integers(1, 7).flatmap(lambda n: st.integers(0, n - 1).map(lambda full: LayerGroups(n, full)))


def hyper(*windows: int) -> Hyper:
    return Hyper(len(windows), 32, 1, 1, 32, 32, 4, 4096, 1e-5, 32, "halves", "silu", windows=windows)


@pytest.mark.parametrize(
    ("layers", "windowed", "expected"),
    [
        (26, 13, (13, LayerGroups(2, 1))),  # Gemma 2 2B: every second layer has a window
        (46, 23, (23, LayerGroups(2, 1))),  # Gemma 2 27B
        (18, 15, (3, LayerGroups(6, 1))),  # Gemma 3 270M: five of six layers have one
        (26, 22, (4, LayerGroups(7, 1))),  # Gemma 3 1B
        (48, 40, (8, LayerGroups(6, 1))),  # Gemma 3 12B
        (32, 32, (32, ONE_GROUP)),
        (32, 0, (32, ONE_GROUP)),
        (31, 1, (31, ONE_GROUP)),  # other groups would save 1 %
    ],
)
def test_groups_of_known_models(layers: int, windowed: int, expected: tuple[int, LayerGroups]) -> None:
    assert divide_layers(layers, windowed) == expected


@given(windows=st.lists(st.sampled_from([0, 64]), min_size=1, max_size=60))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(windows: list[int]) -> None:
    geometry = KvGeometry.of(hyper(*windows), 32, "f16")
    geometry.check()
    groups = geometry.groups
    places = places_of_layers(windows, geometry.page_layers, groups)
    assert len(set(places)) == len(windows)
    for window, (group, place) in zip(windows, places, strict=True):
        assert 0 <= place < geometry.page_layers
        assert group < groups.n_groups <= MAX_GROUPS
        assert groups == ONE_GROUP or (group >= groups.full) == bool(window)
    # With texts of LONG_TEXT windows no division takes more memory than pages of all layers.
    assert geometry.page_layers * (LONG_TEXT * groups.full + groups.windowed) <= LONG_TEXT * len(windows)


def test_the_window_of_a_model_is_that_of_its_groups() -> None:
    assert (hyper(9, 9).kv_window, hyper(9, 9).n_windowed) == (9, 0)
    assert (hyper(0, 9).kv_window, hyper(0, 9).n_windowed) == (9, 1)
    assert (hyper(0, 0).kv_window, hyper(0, 0).n_windowed) == (0, 0)
    undivided = hyper(*(0,) * 30, 9)
    assert (undivided.kv_window, undivided.n_windowed) == (0, 0)
    assert KvGeometry.of(undivided, 32, "f16") == KvGeometry(31, 1, 32, 32, "f16")


def test_a_geometry_without_groups_is_named_as_before_there_were_any() -> None:
    plain, divided = KvGeometry(2, 1, 32, 32, "f16"), KvGeometry(2, 1, 32, 32, "f16", 1)
    assert list(plain.as_meta()) == ["n_layers", "n_kv_heads", "head_dim", "page_tokens", "kv_type"]
    assert divided.as_meta() == {**plain.as_meta(), "n_windowed": 1}
    assert root_hash(bytes(32), plain, "").hex() == "080a334cf061706973e4ccb18bebe08b"
    assert root_hash(bytes(32), divided, "") != root_hash(bytes(32), plain, "")
    for geometry in (plain._replace(n_windowed=2), plain._replace(n_windowed=-1), KvGeometry(31, 1, 32, 32, "f16", 1)):
        with pytest.raises(ArenaError, match="n_windowed is"):
            geometry.check()


def test_heads_that_an_int8_cache_does_not_take_are_named_with_a_remedy() -> None:
    narrow = KvGeometry(2, 1, 80, 32, "f16")
    narrow.check()
    with pytest.raises(ArenaError, match=r"kv_type is 'int8', .* 80 values, expected a multiple of 32; set models\[\]"):
        narrow._replace(kv_type="int8").check()


@given(groups=some_groups, n_places=st.integers(0, 9), unread=st.integers(0, 9))
def test_a_page_table_and_the_pages_held(groups: LayerGroups, n_places: int, unread: int) -> None:
    n_unread = min(unread, n_places)
    n_held = groups.n_pages(n_places, n_unread)
    held = list(range(n_held))
    table = groups.table(held, n_unread)
    assert len(table) == groups.n_pages(n_places)
    assert table.count(NO_PAGE) == n_unread * groups.windowed
    assert groups.held(table, n_unread) == held
    assert groups.without_unread(table, n_unread) == tuple(table)
    assert groups.n_unread(table) == n_unread
    for at, page in enumerate(table):
        place, group = divmod(at, groups.n_groups)
        assert (page == NO_PAGE) == (place < n_unread and group >= groups.full)


@given(page_hash=st.binary(min_size=16, max_size=16), group=st.integers(0, 255), place=st.integers(0, (1 << 24) - 1))
def test_names_of_the_pages_of_a_group(page_hash: bytes, group: int, place: int) -> None:
    name = group_hash(PageHash(page_hash), group)
    assert group_hash(name, group) == page_hash
    assert name[:15] == page_hash[:15]
    assert (name == page_hash) == (group == 0)
    assert unpack_ordinal(pack_ordinal(place, group)) == (place, group)
