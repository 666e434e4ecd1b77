import resource

import pytest

from coati_ext.utils.space import Saved, check_space

SMALL = Saved(what="the adapter", nbytes=1000, largest_file=1000)


def test_what_fits_passes_where_the_directory_is_still_to_be_made(tmp_path):
    check_space("--save_dir", tmp_path / "a" / "b", [SMALL])


def test_a_full_disk_is_told_with_the_parts(tmp_path):
    huge = Saved(what="2 states", nbytes=10**18, largest_file=10)
    with pytest.raises(
        ValueError, match=r"--save_dir .*b: the disk .* \(the adapter 1.0 KB, 2 states 1,0+,0+,0+.0 GB\)"
    ):
        check_space("--save_dir", tmp_path / "b", [SMALL, huge])


def test_the_sum_counts_and_not_each_part(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1500}))
    check_space("--save_dir", tmp_path, [SMALL])
    with pytest.raises(ValueError, match=r"1.5 KB free, and 2.0 KB will be saved"):
        check_space("--save_dir", tmp_path, [SMALL, SMALL])


def test_the_limit_on_a_file_s_size_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (999, 999))
    with pytest.raises(ValueError, match=r"999 B at most here \(ulimit -f\), and the adapter .*1.0 KB"):
        check_space("--save_dir", tmp_path, [SMALL])
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 1000))
    check_space("--save_dir", tmp_path, [SMALL])
