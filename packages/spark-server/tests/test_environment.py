import ast
import re
from pathlib import Path

import pytest

import spark_server
from spark_server import env
from spark_server.machine import read_machine
from spark_server.options.layers import read_environment
from spark_server.options.table import option_table

ROOT = Path(__file__).parents[3]


def test_environment_page_lists_the_variables_and_no_others() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    listed = set(re.findall(r"^\| `((?:SPARK|ATLAS|AVAROK)_\w+)`", page, re.MULTILINE))
    assert listed == set(env.VARIABLES)


def test_environment_is_read_in_env_alone() -> None:
    offenders = []
    for path in Path(spark_server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in ("environ", "getenv") and path.name != "env.py":
                offenders.append(path.name)
    assert offenders == []


def test_variables_stand_for_available_options() -> None:
    for name in env.OPTION_VARIABLES.values():
        assert option_table()[name].spec.available


def test_option_values_takes_the_first_name_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert env.option_values() == {}
    monkeypatch.setenv("AVAROK_NO_TUI", "1")
    monkeypatch.setenv("SPARK_LOG_LEVEL", "debug")
    assert env.option_values() == {"log_level": ("SPARK_LOG_LEVEL", "debug"), "no_tui": ("AVAROK_NO_TUI", "1")}
    assert read_environment(env.option_values()).values == {"log_level": "debug", "no_tui": True}
    monkeypatch.setenv("ATLAS_NO_TUI", "0")
    assert env.option_values()["no_tui"] == ("ATLAS_NO_TUI", "0")


def test_recipe_folders_are_separated_like_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_RECIPE_PATH", "/a:/b/c:")
    assert env.recipe_folders() == (Path("/a"), Path("/b/c"))
    monkeypatch.delenv("SPARK_RECIPE_PATH")
    assert env.recipe_folders() == ()


def fake_root(folder: Path, **groups: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (folder / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in groups.items():
        (folder / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)
    return folder


def test_read_machine_without_limits(tmp_path: Path) -> None:
    machine = read_machine(fake_root(tmp_path, memory_max="max\n", memory_current="5\n", cpu_max="max 100000\n"))
    assert machine.available_memory_bytes == 4000 * 1024
    assert machine.num_cpus >= 1


def test_read_machine_keeps_to_the_control_group(tmp_path: Path) -> None:
    root = fake_root(tmp_path, memory_max="3000000\n", memory_current="1000000\n", cpu_max="50000 100000\n")
    machine = read_machine(root)
    assert machine.available_memory_bytes == 2000000
    assert machine.num_cpus == 1


def test_read_machine_on_this_machine() -> None:
    machine = read_machine()
    assert machine.available_memory_bytes > 1 << 20
    assert machine.num_cpus >= 1
