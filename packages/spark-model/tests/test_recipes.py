"""Recipe files: what is read, what is refused, and how a name finds its file."""

import os
from pathlib import Path

import pytest
from spark_model.data import data_folder
from spark_model.errors import RecipeError
from spark_model.recipes import EXECUTABLE_KEYS, Recipe, find_recipe, list_recipes, locate_recipe, parse_recipe

MINIMAL = 'recipe_version: "2"\nmodel: org/name\nruntime: spark\n'
NESTED_ENV = {"qwen3.6-27b-nvfp4-dflash", "qwen3.6-27b-nvfp4-dflash-code", "qwen3.6-27b-nvfp4-dflash-safe"}


def write(path: Path, text: str = MINIMAL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def parse(tmp_path: Path, extra: str) -> Recipe:
    return parse_recipe(write(tmp_path / "r.yaml", MINIMAL + extra))


def test_every_built_in_recipe_may_run() -> None:
    files = list_recipes()
    assert "smollm2" in [file.name for file in files]
    for file in files:
        recipe = parse_recipe(file.path)
        assert recipe.refusals == () and recipe.warnings == () and recipe.description


def test_published_recipes() -> None:
    folder = os.environ.get("SPARK_TEST_DATA")
    if folder is None:
        pytest.skip("SPARK_TEST_DATA is not set: no published recipes")
    paths = sorted(path for path in Path(folder, "recipes").rglob("*.yaml") if path.name != "registry.yaml")
    assert len(paths) == 39
    for path in paths:
        if path.stem in NESTED_ENV:
            with pytest.raises(RecipeError) as caught:
                parse_recipe(path)
            assert str(caught.value) == (
                f"{path}: `defaults.env` is a map, wanted a string, a number or a boolean\n"
                "  hint: move `env` to the top level of the recipe"
            )
            continue
        recipe = parse_recipe(path)
        assert recipe.name == path.stem and "/" in recipe.model and recipe.runtime == "atlas"
        assert recipe.refusals == () and recipe.warnings == ()
        assert recipe.defaults["max_model_len"]


def test_fields(tmp_path: Path) -> None:
    recipe = parse(
        tmp_path,
        'model_revision: abc\nmin_nodes: 2\nmax_nodes: 4\ncommand: "spark serve x"\n'
        "metadata: {description: ' text ', category: chat}\n"
        "defaults: {port: 8888, ratio: 0.9, speculative: false, name: x}\n"
        'env: {ATLAS_A: "1", NCCL_B: 2}\n',
    )
    assert recipe == Recipe(
        name="r",
        path=tmp_path / "r.yaml",
        model="org/name",
        defaults={"port": 8888, "ratio": 0.9, "speculative": False, "name": "x"},
        env={"ATLAS_A": "1", "NCCL_B": "2"},
        description="text",
        model_revision="abc",
        min_nodes=2,
        max_nodes=4,
        command="spark serve x",
        metadata={"description": " text ", "category": "chat"},
    )


def test_unknown_key_and_foreign_environment_warn(tmp_path: Path) -> None:
    recipe = parse(tmp_path, "defualts: {}\nenv: {LD_PRELOAD: x, SPARK_X: y, PATH: z}\n")
    assert recipe.env == {"SPARK_X": "y"}
    assert recipe.warnings == (
        "key `defualts` is unknown and ignored. Did you mean defaults?",
        "`env.LD_PRELOAD` is ignored: a recipe may set ATLAS_*, SPARK_* and NCCL_* only",
        "`env.PATH` is ignored: a recipe may set ATLAS_*, SPARK_* and NCCL_* only",
    )


@pytest.mark.parametrize("key", EXECUTABLE_KEYS)
def test_executable_keys_are_refused_and_still_listed(key: str, tmp_path: Path) -> None:
    recipe = parse(tmp_path, f"{key}: [rm]\n")
    assert recipe.refusals == (f"`{key}` would run or configure something outside the server",)


@pytest.mark.parametrize(("runtime", "shown"), [("runtime: vllm", "'vllm'"), ("", "missing"), ("runtime: [a]", None)])
def test_other_runtimes_are_refused(runtime: str, shown: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", f'recipe_version: "2"\nmodel: x/y\n{runtime}\n')
    if shown is None:
        with pytest.raises(RecipeError, match="`runtime` is a list, wanted a string"):
            parse_recipe(path)
    else:
        assert parse_recipe(path).refusals == (f"`runtime` is {shown}, wanted atlas or spark",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the top level is empty, wanted a map"),
        ("- a\n", "the top level is a list"),
        ("a: [\n", "line 2: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: not valid YAML: could not determine a constructor"),
        ("model: a\nmodel: b\n", "line 2: key `model` appears twice"),
        (MINIMAL + "defaults: {port: 1, port: 2}\n", "key `port` appears twice"),
        ("1: a\n", "the top level has a key that is a number"),
        ("model: x/y\n", '`recipe_version` is missing, wanted "1" or "2"'),
        ("recipe_version: 3\nmodel: x/y\n", '`recipe_version` is 3, wanted "1" or "2"'),
        ("recipe_version: true\nmodel: x/y\n", "`recipe_version` is True"),
        ('recipe_version: "2"\n', "`model` is missing, wanted a string"),
        ('recipe_version: "2"\nmodel: " "\n', "`model` is ' ', wanted a string"),
        ('recipe_version: "2"\nmodel: [a]\n', "`model` is a list"),
        (MINIMAL + "defaults: [a]\n", "`defaults` is a list, wanted a map"),
        (MINIMAL + "defaults: {a: [1]}\n", "`defaults.a` is a list, wanted a string, a number or a boolean"),
        (MINIMAL + "defaults: {a: }\n", "`defaults.a` is empty"),
        (MINIMAL + "defaults: {a: 2026-01-01}\n", "`defaults.a` is a date"),
        (MINIMAL + "defaults: {1: a}\n", "`defaults` has a key that is a number"),
        (MINIMAL + "env: {ATLAS_A: true}\n", r"`env.ATLAS_A` is a boolean, wanted a string \(put it into quotes\)"),
        (MINIMAL + "env: a\n", "`env` is a string, wanted a map"),
        (MINIMAL + "min_nodes: 0\n", "`min_nodes` is 0, wanted a whole number of at least 1"),
        (MINIMAL + "max_nodes: two\n", "`max_nodes` is 'two'"),
        (MINIMAL + "min_nodes: 3\nmax_nodes: 2\n", "`max_nodes` is 2, less than `min_nodes` 3"),
        (MINIMAL + "metadata: a\n", "`metadata` is a string"),
        (MINIMAL + "x: " + "[" * 5000, "nested too deep|not valid YAML"),
        ("#" * 70000, "larger than 64 KiB"),
        ("\x00", "not valid YAML"),
    ],
)
def test_wrong_recipes(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", text)
    with pytest.raises(RecipeError, match=message) as caught:
        parse_recipe(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_aliases_do_not_explode(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    recipe = parse(tmp_path, "\n".join(lines) + "\nmetadata: {x: *a39}\n")
    assert len(recipe.warnings) == 40


def test_names_and_scopes(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    mine = write(first / "family" / "mine.yaml")
    shadow = write(first / "smollm2.yaml")
    both = [write(first / "both.yml"), write(second / "both.yaml")]
    dirs = [first, second]
    builtin = data_folder("recipes") / "smollm2.yaml"
    assert locate_recipe("mine", dirs) == mine
    assert locate_recipe("smollm2", dirs) == builtin  # a directory cannot shadow a built-in recipe
    assert locate_recipe("@builtin/smollm2", dirs) == locate_recipe("@atlas/smollm2", dirs) == builtin
    assert locate_recipe("@one/smollm2", dirs) == shadow
    assert locate_recipe("@two/smollm2", dirs) is None
    assert locate_recipe(str(mine), ()) == mine
    assert locate_recipe("nothing", dirs) is None
    with pytest.raises(RecipeError) as caught:
        locate_recipe("both", dirs)
    assert str(caught.value) == f"recipe `both` is ambiguous: {both[0]}, {both[1]}; give the path of one"
    assert locate_recipe("@two/both", dirs) == both[1]
    assert [(file.name, file.source) for file in list_recipes(dirs)][-4:] == [
        ("both", "one"),
        ("mine", "one"),
        ("smollm2", "one"),
        ("both", "two"),
    ]


def test_find_errors(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe named `smolm2`. Did you mean smollm2\?"):
        find_recipe("smolm2")
    with pytest.raises(RecipeError, match="no recipe source `@x`; there are @builtin"):
        find_recipe("@x/smollm2")
    with pytest.raises(RecipeError, match=r"`\.\./smollm2` is not a recipe name"):
        find_recipe("@builtin/../smollm2")
    with pytest.raises(RecipeError, match=r"nowhere\.yaml: no such file"):
        find_recipe("nowhere.yaml")
    with pytest.raises(RecipeError, match="recipe directory .*absent does not exist"):
        list_recipes([tmp_path / "absent"])


def test_links_out_of_a_directory_are_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside.yaml")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "linked.yaml").symlink_to(outside)
    assert locate_recipe("linked", [tmp_path / "inside"]) is None
