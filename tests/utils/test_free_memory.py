import pytest

from lightning_memo.utils.free_memory import available_host_bytes

GIB = 2**30


def tree(root, files):
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def meminfo(available_gib):
    kib = available_gib * 2**20
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree:  1 kB\nMemAvailable:   {kib} kB"}


def v2(group, limit, used, cache=0):
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    stat = f"anon 5\nfile 7\ninactive_anon 123456\ninactive_file {cache}\nactive_file 99"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def v1(group, limit, used, cache=0):
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": stat,
    }


def test_without_cgroups_the_machine_decides(tmp_path):
    assert available_host_bytes(tree(tmp_path, meminfo(20))) == 20 * GIB


@pytest.mark.parametrize(
    ("groups", "expected_gib"),
    [
        ([v2("a/b", 8 * GIB, 5 * GIB)], 3),
        ([v2("a/b", 8 * GIB, 5 * GIB, cache=2 * GIB)], 5),
        ([v2("a/b", "max", 5 * GIB)], 20),
        ([v2("a/b", "max", 5 * GIB), v2("a", 6 * GIB, 5 * GIB)], 1),
        ([v2("a/b", 9 * GIB, 5 * GIB), v2("a", "max", 5 * GIB), v2("", 8 * GIB, 6 * GIB)], 2),
        ([v2("a/b", 90 * GIB, 5 * GIB)], 20),
        ([v2("a/b", 4 * GIB, 5 * GIB)], 0),
        ([v2("a/b", 4 * GIB, GIB, cache=2 * GIB)], 4),
        ([v2("other", 1 * GIB, 0)], 20),
    ],
)
def test_v2_limits_of_all_groups_above_count(tmp_path, groups, expected_gib):
    tree(tmp_path, meminfo(20) | {"proc/self/cgroup": "0::/a/b"})
    for group in groups:
        tree(tmp_path, group)
    assert available_host_bytes(tmp_path) == expected_gib * GIB


def test_a_group_without_statistics_still_limits(tmp_path):
    tree(tmp_path, meminfo(20) | {"proc/self/cgroup": "0::/a"} | v2("a", 8 * GIB, 5 * GIB))
    (tmp_path / "sys/fs/cgroup/a/memory.stat").unlink()
    assert available_host_bytes(tmp_path) == 3 * GIB


@pytest.mark.parametrize("path", ["/", "/../../system.slice/job", "/host/path/that/is/not/mounted"])
def test_in_a_container_the_mount_itself_is_the_group(tmp_path, path):
    tree(tmp_path, meminfo(20) | {"proc/self/cgroup": f"0::{path}"} | v2("", 8 * GIB, 5 * GIB))
    assert available_host_bytes(tmp_path) == 3 * GIB


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_v1_limits_count(tmp_path, controllers):
    unlimited = 9223372036854771712
    tree(tmp_path, meminfo(20) | {"proc/self/cgroup": f"12:pids:/x\n4:{controllers}:/job/step\n1:name=systemd:/\n0::/"})
    tree(tmp_path, v1("job/step", unlimited, GIB) | v1("", unlimited, GIB))
    assert available_host_bytes(tmp_path) == 20 * GIB
    tree(tmp_path, v1("job", 8 * GIB, 6 * GIB, cache=GIB))
    assert available_host_bytes(tmp_path) == 3 * GIB


def test_v2_beside_v1_is_found_in_its_own_folder(tmp_path):
    tree(tmp_path, meminfo(20) | {"proc/self/cgroup": "0::/job"} | v2("unified/job", 8 * GIB, 6 * GIB))
    assert available_host_bytes(tmp_path) == 2 * GIB


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal: 5 kB"}])
def test_a_system_that_says_nothing_asks_for_a_setting(tmp_path, files):
    with pytest.raises(ValueError, match='set host_memory, for example "32GiB"'):
        available_host_bytes(tree(tmp_path, files))


def test_this_machine_has_memory():
    assert 0 < available_host_bytes() < 2**50
