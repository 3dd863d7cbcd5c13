from pathlib import Path

import pytest

from spark_model.checkpoint import ModelFacts
from spark_model.data import data_folder
from spark_model.errors import RecipeError
from spark_model.model_toml import find_model_toml, read_model_toml

VALID = """
[model]
name = "Tiny"
match_names = ["Tiny"]
[[model_types]]
model_type = "llama"
[sampling.non_thinking]
temperature = 0.5
top_k = 7
[behavior]
thinking_default = false
max_thinking_budget = 9
"""


def facts(model_type: str = "llama", hidden_size: int = 576) -> ModelFacts:
    return ModelFacts(
        architecture="LlamaForCausalLM",
        config={"model_type": model_type, "hidden_size": hidden_size},
        context_length=2048,
        vocab_size=100,
        eos_token_ids=(2,),
        generation={},
        weight_bytes=1,
    )


def write(folder: Path, family: str, content: str) -> Path:
    path = folder / family / "MODEL.toml"
    path.parent.mkdir()
    path.write_text(content)
    return path


def test_read_model_toml_gives_every_field(tmp_path: Path) -> None:
    read = read_model_toml(write(tmp_path, "tiny", VALID))
    assert (read.name, read.hf_id, read.match_names) == ("Tiny", "", ("tiny",))
    assert [(entry.model_type, entry.hidden_size) for entry in read.model_types] == [("llama", None)]
    assert read.sampling == {"temperature": 0.5, "top_k": 7}
    assert (read.thinking_default, read.max_thinking_budget) == (False, 9)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "temperature",
            "temprature",
            "unknown key `temprature` in [sampling.non_thinking]; did you mean `temperature`?",
        ),
        ("[sampling.", "[samplin.", "unknown key `samplin` in the file; did you mean `sampling`?"),
        ("non_thinking", "tools", "unknown key `tools` in [sampling]; known are non_thinking"),
        ('model_type = "llama"', 'model_typ = "llama"', "unknown key `model_typ` in [[model_types]]"),
        ('model_type = "llama"', "hidden_size = 5", "`model_types.model_type` is missing"),
        ('model_type = "llama"', 'model_type = "llama"\nhidden_size = "5"', "expected a whole number, got '5'"),
        ("[[model_types]]\nmodel_type", "[x]\nmodel_type", "unknown key `x`"),
        ('[[model_types]]\nmodel_type = "llama"\n', "", "[[model_types]] is missing"),
        ("0.5", '"0.5"', "`sampling.non_thinking.temperature`: expected a number, got '0.5'"),
        ("0.5", "true", "expected a number, got True"),
        ("default = false", "default = 0", "`behavior.thinking_default`: expected true or false, got 0"),
        ("budget = 9", "budget = -9", "`behavior.max_thinking_budget`: expected a whole number from 0 up, got -9"),
        (
            "max_think",
            "max_thnk",
            "unknown key `max_thnking_budget` in [behavior]; did you mean `max_thinking_budget`?",
        ),
        ('name = "Tiny"\n', "", "`model.name` is missing"),
        ('["Tiny"]', '[""]', "expected a list of names"),
        ("[model]", "[model", "line 2"),
    ],
)
def test_read_model_toml_names_what_is_wrong(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in VALID
    path = write(tmp_path, "tiny", VALID.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        read_model_toml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


def test_find_model_toml_prefers_the_exact_configuration(tmp_path: Path) -> None:
    plain = VALID.replace('match_names = ["Tiny"]\n', "")
    write(tmp_path, "any", plain)
    exact = write(tmp_path, "exact", plain.replace('"llama"', '"llama"\nhidden_size = 576'))
    found = find_model_toml(facts(), ["x"], tmp_path)
    assert found is not None
    assert found.path == exact
    other_size = find_model_toml(facts(hidden_size=8), ["x"], tmp_path)
    assert other_size is not None
    assert other_size.path.parent.name == "any"


def test_find_model_toml_wants_a_matching_name_and_type(tmp_path: Path) -> None:
    write(tmp_path, "tiny", VALID)
    assert find_model_toml(facts(), ["org/My-TINY-1B", "x"], tmp_path) is not None
    assert find_model_toml(facts(), ["org/other"], tmp_path) is None
    assert find_model_toml(facts("qwen2"), ["tiny"], tmp_path) is None


def test_find_model_toml_refuses_a_tie(tmp_path: Path) -> None:
    write(tmp_path, "a", VALID)
    write(tmp_path, "b", VALID)
    with pytest.raises(RecipeError, match="both fit tiny; narrow one with match_names"):
        find_model_toml(facts(), ["tiny"], tmp_path)


def test_shipped_files_are_valid() -> None:
    files = sorted(data_folder("models").glob("*/MODEL.toml"))
    assert files
    for path in files:
        read_model_toml(path)


def test_smollm2_gets_the_sampling_of_its_model_card() -> None:
    names = ["smollm2", "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"]
    found = find_model_toml(facts(), names)
    assert found is not None
    assert found.sampling == {"temperature": 0.2, "top_p": 0.9}
    assert find_model_toml(facts(), ["SmolLM-135M"]) is None  # the same sizes, another model
